"""How many requests share one Transformer: policy, execution, the asynchronous front."""
