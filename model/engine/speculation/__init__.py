"""Speculative decoding: who proposes tokens, what is proposed in a step, and how many were accepted."""
