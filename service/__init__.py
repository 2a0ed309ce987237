"""How a model is reached: typed HTTP, metrics, Ray Serve."""
