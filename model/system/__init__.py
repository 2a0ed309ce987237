"""Interfaces to the machine: memory, devices, copies between them, child processes."""
