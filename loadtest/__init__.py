"""Load on engines and services, measured."""
