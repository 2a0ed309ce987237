"""The command `bodies`, which measures what streams notice of bodies that cost much for their size.

Streams of `lab.paced_engine`, which computes nothing, are read alone, and then while another process sends
`lab.worst_bodies`, each as large as a body may be, one after the other at a set rate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.faults.site import Site
from lab.paced_engine import MODULE, PACE
from lab.worst_bodies import many_tokens, worst_bodies
from triptych.loadtest.errors import ServerError
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output
from triptych.model.system.child_process import ENGINE_VARIABLE

_MODEL = "assistant=model/pretrained/checkpoints/assistant"  # it has a chat template
_VALUES = (2_000_000, 45_000, 10_000)  # of the bodies, in turn: refused by their number, and not


def add_command(commands: Any) -> None:
    text = "Read streams of an engine that computes nothing, alone and while expensive bodies arrive."
    parser = commands.add_parser("bodies", help="what streams notice of expensive bodies", description=text)
    parser.add_argument("--model", default=_MODEL, metavar="NAME=PATH", help="model to serve")
    parser.add_argument("--streams", type=flags.positive, default=8, metavar="N", help="concurrent streams")
    parser.add_argument("--rate", type=flags.above_zero, default=400.0, metavar="TOKENS/S", help="of all streams")
    parser.add_argument("--seconds", type=flags.above_zero, default=20.0, metavar="S", help="of each measurement")
    parser.add_argument("--megabytes", type=flags.above_zero, default=1.0, metavar="MB/S", help="of bodies")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    environment = {ENGINE_VARIABLE: MODULE, PACE: f"{options.rate} {options.streams}"}
    model = options.model.partition("=")[0]
    with Site([options.model, "--runtime", "local"], environment=environment, every_core=True) as site:
        _gaps(site, model, options.streams, 2.0)  # of connections and imports that are new
        alone = _gaps(site, model, options.streams, options.seconds)
        arguments = (site.address, model, options.megabytes)
        sender = multiprocessing.get_context("spawn").Process(target=_send, args=arguments, daemon=True)
        sender.start()
        try:
            time.sleep(2.0)
            together = _gaps(site, model, options.streams, options.seconds)
            if not sender.is_alive():
                raise ServerError("the process that sends bodies has ended")
        finally:
            sender.kill()
            sender.join()
    results = {name: _figures(gaps) for name, gaps in (("alone", alone), ("with bodies", together))}
    results["ratio"] = {"p99": results["with bodies"]["p99_ms"] / results["alone"]["p99_ms"]}
    for name in ("alone", "with bodies"):
        found = results[name]
        print(f"{name}: p99 {found['p99_ms']:.1f} ms between tokens, longest {found['longest_ms']:.1f} ms")
    print(f"p99 with bodies over p99 alone: {results['ratio']['p99']:.2f}", flush=True)
    about = {"kind": "bodies", "commit": page.commit(), "machine": page.describe()}
    names = ("model", "streams", "rate", "seconds", "megabytes")
    print(output.line(about | {name: getattr(options, name) for name in names} | {"results": results}), flush=True)
    return 0


def _figures(gaps: Sequence[float]) -> dict[str, float]:
    return {"p99_ms": 1000 * float(np.percentile(gaps, 99)), "longest_ms": 1000 * max(gaps), "tokens": len(gaps)}


def _gaps(site: Site, model: str, streams: int, seconds: float) -> list[float]:
    """Return the times between tokens of streams that are read at a time for so long."""
    found: list[list[float]] = [[] for _ in range(streams)]
    end = time.monotonic() + seconds
    readers = [threading.Thread(target=_read, args=(site.address, model, end, gaps)) for gaps in found]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    gaps = [gap for one in found for gap in one]
    if not gaps:
        raise ServerError("the streams sent no tokens")
    return gaps


def _read(address: tuple[str, int], model: str, end: float, gaps: list[float]) -> None:
    """Read one stream after the other until `end`, and add the times between tokens to `gaps`."""
    body = json.dumps({"model": model, "prompt": "def f(x):", "stream": True, "max_tokens": 200, "ignore_eos": True})
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(*address, timeout=60)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        before = 0.0
        while line := reply.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if before:
                    gaps.append(now - before)
                before = now
        connection.close()


def _send(address: tuple[str, int], model: str, megabytes: float) -> None:
    """Send bodies one after the other at a rate, forever."""
    began, sent = time.monotonic(), 0
    while True:
        for values in _VALUES:
            for worst in (*worst_bodies(), *many_tokens()):
                body = worst.of_model(model).body(values=values)
                connection = http.client.HTTPConnection(*address, timeout=60)
                try:
                    connection.request("POST", worst.route, body, {"Content-Type": "application/json"})
                    connection.getresponse().read()
                except OSError:  # refused before all of it was read
                    pass
                finally:
                    connection.close()
                sent += len(body)
                time.sleep(max(0.0, began + sent / (1e6 * megabytes) - time.monotonic()))
