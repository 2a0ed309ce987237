"""Types that the whole service shares: errors, request contexts, the engine client, the models."""
