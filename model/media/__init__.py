"""Bytes of images to features."""
