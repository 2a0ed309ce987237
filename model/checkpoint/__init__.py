"""Checkpoint folders: their files, validated before weights are loaded."""
