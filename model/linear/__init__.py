"""Linear layers in every number format."""
