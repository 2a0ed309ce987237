"""Raw bytes to a server, and the replies and the fate of the connection that HTTP's standards ask for."""
