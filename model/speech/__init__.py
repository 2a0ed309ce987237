"""Transcription without I/O: which windows of an audio are decoded next, and what their tokens say."""
