"""What all of the service speaks of: errors, requests' contexts, the engine, models."""
