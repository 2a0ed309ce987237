"""The KV cache of a model's layers."""
