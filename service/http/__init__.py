"""HTTP: request bodies, checks of headers, replies and server-sent events."""
