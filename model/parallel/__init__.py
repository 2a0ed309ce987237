"""One model over several devices of a machine: each rank is a process with its share of every matrix."""
