"""How the embedded models are trained and judged."""
