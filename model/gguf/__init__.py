"""GGUF, the container of llama.cpp's models: metadata and the places of tensors, read within bounds. No torch."""
