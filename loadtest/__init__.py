"""Load tests of a service, and benchmarks of engines."""
