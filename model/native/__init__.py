"""Transformer stacks in C for the CPU: compiled on the machine that runs them, called through a plain C interface.

`build` compiles and caches, `library` declares the C interface, `linear` packs weights, `stack` runs all layers of a
stack in one call. Nothing here is needed for a right answer: where there is no compiler, torch computes the same.
"""
