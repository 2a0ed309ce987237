"""What clients see when something goes wrong: a service of its own, under load, one fault at a time.

`python -m loadtest faults` measures what the service can do, puts 70 % of that on it, injects a fault, and counts how
every request ended. Only processes that it started are hurt.
"""
