"""Images of requests: the files as they are sent, and the sandbox that decodes them."""
