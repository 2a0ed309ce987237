"""Transformer models and the engine that batches requests over them. Independent of HTTP and Ray."""
