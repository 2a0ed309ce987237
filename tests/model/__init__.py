"""What a Transformer computes: networks, checkpoints, sampling, text."""
