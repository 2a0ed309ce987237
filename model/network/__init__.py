"""The Transformer: modules of one forward pass, and their weights."""
