"""Benchmarks of engines without a server, on models of published shapes.

`models` builds the models, `batches` has the workloads, `roofline` computes their least time; `ours` and `peers` run
them, each engine in its own process. `host` measures the Python time of a step. `gpu` is a separate benchmark for
machines with a GPU.
"""
