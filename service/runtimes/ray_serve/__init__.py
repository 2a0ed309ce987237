"""The service as deployments of Ray Serve."""
