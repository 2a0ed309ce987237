"""What a Transformer computes, and how many requests share one. Knows nothing of HTTP or Ray."""
