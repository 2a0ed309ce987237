"""The machine: memory, devices, copies between them, child processes."""
