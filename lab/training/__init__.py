"""Training and evaluation of the embedded models."""
