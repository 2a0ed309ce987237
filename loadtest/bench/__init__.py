"""Engines without a server, on models of real shapes: workloads, floors, peers.

`models` builds them, `workloads` says what is asked, `floors` what it must cost at least; `ours` and `peers` answer,
each in a `worker` process of its own. `host` measures what a step costs in Python. `gpu` is a bench of its own for a
machine with a GPU.
"""
