"""One module for each area, with a function `run(report, packages)`; its first docstring line says what it compares."""
