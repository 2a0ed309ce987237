"""Measurements and training that the project uses on itself; not part of the wheel or the image.

`bench` measures engines without a server, `faults` breaks a running service, `training` makes the embedded models,
`servers` starts other servers, and `commands` are what `python -m lab COMMAND` runs. The load generator that users run
is `loadtest`.
"""
