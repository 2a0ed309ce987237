"""Data types that the front and the engine process exchange: requests, settings, results. No torch."""
