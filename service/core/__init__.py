"""Types that the whole service shares: errors, request contexts, the engine client, the registry of models."""
