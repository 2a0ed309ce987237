"""Writes checkpoints whose projections are integers: the command `triptych quantize`."""
