"""Transformer stacks in C for the CPU: compiled for a level of CPUs or for the one at hand, called through a plain C
interface.

`levels` says what a CPU can run, `build` finds or compiles a library, `library` declares the C interface, `linear`
packs weights, `stack` runs all layers of a stack in one call. Nothing here is needed for a right answer: without a
library torch computes the same.
"""
