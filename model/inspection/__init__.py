"""Descriptions of a model for `triptych inspect`: parameters and costs, and attention maps."""
