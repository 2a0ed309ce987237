"""The front's side of the engine: admission, streams, the engine's process. No torch."""
