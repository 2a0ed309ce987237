"""The HTTP service over the engines: typed requests and replies, metrics, and runtimes."""
