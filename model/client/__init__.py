"""The front process's side of an engine: admission control, output streams, the transport. No torch."""
