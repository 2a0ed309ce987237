"""Transcription: routes, bodies, dialects, decoding of files in a sandbox, and the jobs that run it."""
