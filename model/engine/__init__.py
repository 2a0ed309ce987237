"""Many requests over one Transformer: policy (no torch), execution, and the asynchronous front."""
