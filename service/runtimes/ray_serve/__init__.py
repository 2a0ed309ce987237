"""The Ray Serve runtime: replicas, HTTP ingress, autoscaling."""
