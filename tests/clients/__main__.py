"""Runs clients against one service and prints what works: `python -m tests.clients [CLIENT ...]`.

A run of all clients writes the table of docs/api.md. Exit status: 1 where a failure is not in known.toml, or where an
entry of it fails no longer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.clients.environments import environment_of, python_of
from tests.clients.models import served_models
from tests.clients.results import Result, cells, markdown, read_known, surprises, write_docs
from tests.clients.table import CLIENTS, COLUMNS, PROGRAMS, Client
from tests.service.processes import running

KEY = "sk-of-the-clients-test"
_SECONDS = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", nargs="*", choices=[[], *(one.name for one in CLIENTS)], help="all without any")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each feature")
    parser.add_argument("--jobs", type=int, default=2, help="clients at a time (default: 2)")
    parser.add_argument("--url", help="a service that runs already (its key: see KEY)")
    options = parser.parse_args()
    chosen = [one for one in CLIENTS if not options.client or one.name in options.client]
    if options.url:
        return run_all(chosen, options.url, options.jobs, options.verbose)
    with running(["--runtime", "local", "--api-key", KEY, *served_models()]) as service:
        return run_all(chosen, service.url, options.jobs, options.verbose)


def run_all(chosen: list[Client], url: str, jobs: int, verbose: bool) -> int:
    known, rows, unexpected = read_known(), dict[str, list[Result]](), list[str]()
    print(f"{'client':<36}{''.join(f'{name:<11}' for name in COLUMNS)}seconds")
    with ThreadPoolExecutor(jobs) as threads:
        for client, (results, seconds) in zip(chosen, threads.map(lambda one: timed(one, url), chosen), strict=True):
            rows[client.title] = results
            print(f"{client.title:<36}{''.join(f'{cell:<11}' for cell in cells(results))}{seconds:.0f}", flush=True)
            for one in results if verbose else ():
                print(f"  {'ok  ' if one.ok else 'FAIL'} {one.feature}: {one.detail}", flush=True)
            unexpected += surprises(client, results, known.get(client.name, {}))
    if len(chosen) == len(CLIENTS):
        write_docs(markdown(rows, {one.title: known[one.name] for one in CLIENTS if one.name in known}))
    print("\n".join(unexpected))
    return 1 if unexpected else 0


def timed(client: Client, url: str) -> tuple[list[Result], float]:
    """Return a client's results and the seconds that they took."""
    began = time.monotonic()
    return run_client(client, url), time.monotonic() - began


def run_client(client: Client, url: str) -> list[Result]:
    """Run a client's program, which prints a line of JSON for each feature; its own end is a feature too."""
    missing = [command for command in client.needs if shutil.which(command) is None]
    if missing:
        return [Result("other: commands of this machine", False, f"{', '.join(missing)}: not found")]
    try:
        command = [str(python_of(client)), str(PROGRAMS / client.program), url, KEY]
        done = subprocess.run(
            command, env=environment_of(client), capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [Result("other: the program", False, str(error)[-600:])]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    results = [Result(**one) for one in lines]
    if done.returncode or not results:
        results.append(Result("other: the program", False, (done.stderr or done.stdout).strip()[-600:]))
    return results


if __name__ == "__main__":
    sys.exit(main())
