"""The command `peer`: transformers' continuous batching on the same requests, in a process with a timeout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import torch

from lab.bench.gpu.cases import Case
from lab.bench.gpu.engines import add, bench_requests, finish, load, warm
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench, release
from lab.bench.gpu.shapes import GPU_MODELS, tiny_shape

_MODEL = "qwen3-0.6b"
_TIMEOUT_S = 240.0  # of the peer; triptych takes seconds
_OURS_S = 45.0


def cases(bench: Bench) -> list[Case]:
    return [Case(f"{_MODEL}, transformers", _against, 120)]


def _against(bench: Bench) -> Figures:
    """Return triptych's relative speed on 64 greedy requests of 100 to 512 input and output tokens."""
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    raw = tiny_shape(GPU_MODELS[_MODEL]) if bench.tiny else GPU_MODELS[_MODEL]
    rng, count, (least, most) = random.Random(0), *((2, (4, 8)) if bench.tiny else (64, (100, 512)))
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(count)]
    ready = load(bench, raw, seqs=count, context=2 * most + 16, name=_MODEL)
    warm(ready, most)
    given = bench_requests(ready, lengths)
    add(ready, given)
    ours = finish(ready).seconds
    tokens = sum(wanted for _, wanted in lengths)
    found: Figures = {"out_tokens_per_s": tokens / ours}
    del ready
    release(bench.device)
    task = {
        "raw": raw,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device": str(bench.device),
        "asks": [(ask.prompt, ask.wanted) for ask in given],
    }
    command = [sys.executable, "-m", "lab.bench.gpu.peer"]
    patience = max(10.0, min(_TIMEOUT_S, bench.left - 20))
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=patience, check=True
        )
    except subprocess.TimeoutExpired:
        return found | {"failed": f"transformers was not done in {patience:.0f} s", "times_at_least": patience / ours}
    except subprocess.CalledProcessError as error:
        return found | {"failed": f"transformers: {error.stderr.strip()[-400:]}"}
    theirs = json.loads(done.stdout.splitlines()[-1])
    return found | {"times": theirs["seconds"] / ours, "theirs_per_s": tokens / theirs["seconds"], **theirs["versions"]}


def main() -> None:
    """Run the peer; its second run counts, as the first compiles."""
    task: dict[str, Any] = json.load(sys.stdin)
    from lab.bench.batches import BenchRequest, Workload
    from lab.bench.peers.continuous import random_engine

    peer = random_engine(task["raw"], getattr(torch, task["dtype"]), torch.device(task["device"]))
    workload = Workload("streams", tuple(BenchRequest(tuple(ids), wanted) for ids, wanted in task["asks"]))
    try:
        seconds = [peer.run(workload).seconds for _ in range(2)][-1]
    finally:
        peer.close()
    print(json.dumps({"seconds": seconds, "versions": {"transformers": peer.info["version"]}}), flush=True)


if __name__ == "__main__":
    main()
