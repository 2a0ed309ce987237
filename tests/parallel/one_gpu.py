"""Two ranks on one GPU sum in symmetric memory: `python -m tests.parallel.one_gpu`. It needs torch alone.

The processes take turns on the GPU, so this shows that the sums are right, not how long they take.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from triptych.model.config.sharding import Shard
from triptych.model.parallel import group as groups
from triptych.model.parallel import symmetric_sums

SECONDS = 100.0


def run_rank(rank: int, rendezvous: int, *, alone: bool) -> str:
    """Sum with the other rank; then, if `alone`, once without it. Return which kernels there are."""
    groups._nccl = groups._gloo  # NCCL refuses two ranks on one GPU
    symmetric_sums._unavailable = lambda shard, device: ""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = groups.Group(Shard(rank, 2), device)
    group.connect(rendezvous)
    sums = group._symmetric
    if sums is None:
        raise SystemExit("symmetric memory could not be set up")
    for rows in (1, 4, 64):
        x = torch.full((rows, 4096), rank + 1.0, device=device, dtype=torch.bfloat16)
        for _ in range(10):
            summed = group.sum(x.clone())
            sums._wait()
            if not (summed == 3).all():
                raise SystemExit(f"a sum of {rows} rows is wrong")
    if alone and rank == 0:
        group.sum(x.clone())
        time.sleep(0.5)
        sums.release()
        sums._wait()
    return "multimem" if sums.has_multimem else "one shot"


def check(*, alone: bool) -> str:
    """Run both ranks in processes; return which kernels there are, or raise `RuntimeError` with what they print."""
    rendezvous = os.memfd_create("ranks")
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.one_gpu", str(rank), str(rendezvous), str(int(alone))],
            pass_fds=[rendezvous],
            env={**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, _ = programs[0].communicate(timeout=SECONDS)
        if programs[0].returncode:
            raise RuntimeError(out)
        return out.strip().splitlines()[-1]
    finally:
        for program in programs:
            program.kill()
            program.wait()
        os.close(rendezvous)


def main() -> None:
    if len(sys.argv) > 1:
        rank, rendezvous, alone = map(int, sys.argv[1:])
        print(run_rank(rank, rendezvous, alone=bool(alone)), flush=True)
        if rank:
            sys.stdin.read()  # rank 0 is not alone before it is done
        os._exit(0)
    for alone in (False, True):
        began = time.monotonic()
        kernels = check(alone=alone)
        name = "a rank that waits alone is released" if alone else "two ranks sum"
        print(f"{name}: ok ({kernels}, {time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
