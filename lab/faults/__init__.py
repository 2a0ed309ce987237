"""Fault injection: what clients of a service under load observe at each of several faults.

`python -m lab faults` starts a service, measures its capacity, applies 70 % of that as load, injects a fault, and
counts how all requests end. It signals only processes that it has started.
"""
