"""One module for each area. It has a function `run(report, packages)`; its first docstring line says what is compared."""
