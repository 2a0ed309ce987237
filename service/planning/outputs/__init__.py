"""What /encode can return: one table of outputs, and how the engine's arrays become the items of a reply."""
