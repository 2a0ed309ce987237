"""Tokenisation, incremental detokenisation and grammars for constrained decoding."""
