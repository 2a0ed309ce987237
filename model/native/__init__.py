"""The C library of the CPU: compiled for a level of instructions or for the CPU at hand, called through ctypes.

`levels` lists what a CPU may have, `build` finds or compiles a library, `structures` and `library` declare what it
reads and does. `triptych.model.linear.native` packs matrices for it, `triptych.model.network.native_stack` describes
stacks to it. Every result can be had without: where there is no library, torch computes the same. docs/kernels.md
describes the kernels.
"""
