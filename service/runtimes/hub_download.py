"""Downloads a model of the Hub in a separate process, which can be killed at any time.

    python -m triptych.service.runtimes.hub_download hf:ORGANISATION/NAME PICKLE MAX_BYTES LOG_FORMAT

prints the folder; for an error it prints the error and exits 2. It ends when its standard input is closed, so that it
does not outlive the service.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from asyncio import subprocess
from contextlib import suppress
from pathlib import Path

from triptych.model.errors import ConfigError
from triptych.model.system import python_child
from triptych.service.observability import logs
from triptych.service.settings.service_settings import LogFormat


async def download(path: str, *, pickle: bool, max_bytes: int, log_format: LogFormat) -> Path:
    """Download a model of the Hub and return its folder; raises `ConfigError`. Cancelling ends the download.

    The downloaded part stays in the cache, and the next attempt continues there.
    """
    process = await asyncio.create_subprocess_exec(
        *python_child.command(
            "triptych.service.runtimes.hub_download", path, str(int(pickle)), str(max_bytes), log_format
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | python_child.import_path(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        reply = await process.stdout.read()
        await process.wait()
    finally:
        process.stdin.close()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        found: dict[str, str] = json.loads(reply)
    except ValueError:
        raise ConfigError(f"{path}: the download ended with exit code {process.returncode}") from None
    if "error" in found:
        raise ConfigError(found["error"])
    return Path(found["folder"])


def _end_with_parent() -> None:
    """Exit when standard input is closed."""

    def watch() -> None:
        while os.read(0, 1):  # not with `sys.stdin`, whose lock would disturb the interpreter's exit
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    _end_with_parent()
    path, pickle, max_bytes, log_format = sys.argv[1:]
    logs.setup(log_format)  # type: ignore[arg-type]
    from triptych.model.checkpoint import hub

    try:
        folder = hub.local_folder(path, pickle=pickle == "1", max_bytes=int(max_bytes))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    print(json.dumps({"folder": str(folder)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
