"""HTTP: reading bodies, checking headers, writing replies and server-sent events."""
