"""GGUF files as checkpoints: settings and tensors by the names that families' tables have for them."""
