"""Media files to model inputs."""
