"""Text to tokens and back, and the grammars that an output may be held to."""
