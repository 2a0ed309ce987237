"""The Ray Serve runtime."""
