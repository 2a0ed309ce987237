"""The engine process: batching of requests over Transformers (`scheduling`: no torch), and its execution."""
