"""Image files to the pixels that a vision model reads."""
