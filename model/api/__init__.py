"""What the front and the engine's process tell each other: requests, settings, results. No torch."""
