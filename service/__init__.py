"""The HTTP service that gives clients access to the engines: requests and replies, metrics, and runtimes."""
