"""What `triptych inspect` shows: a model's parts, and its attention."""
