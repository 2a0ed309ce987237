"""Transcriptions: audio files to text, in as many requests to the engine as they have windows."""
