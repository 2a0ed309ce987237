"""The machine of the GPU benchmark: its description, its measured ceilings, and the timing of work."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

from lab.bench.gpu.figures import Figures, Skip, Stop
from lab.bench.roofline import Ceilings
from triptych.model.attention.selection import select_backend

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pytest")


@dataclass
class Bench:
    """Holds the device, the settings and the deadline of a run, and times work."""

    device: torch.device
    dtype: torch.dtype  # of the workloads
    tiny: bool
    folder: Path
    ends: float  # of time.monotonic()
    warnings: list[str] = field(default_factory=list)  # logged since the case began

    @classmethod
    def here(cls, folder: Path, *, tiny: bool, ends: float) -> Bench:
        """Use this machine's GPU, or its CPU if it has none."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(device, torch.bfloat16 if device.type == "cuda" else torch.float32, tiny, folder, ends)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.ends - time.monotonic()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def ceilings(self) -> Ceilings:
        """The bandwidth of a large copy, read and written, and the rate of a large bfloat16 product."""
        size, side = (1 << 20, 128) if self.tiny else (1 << 32, 8192)
        source = torch.randint(0, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        copied = min(self.seconds_of(lambda: target.copy_(source)) for _ in range(10))
        multiplied = min(self.seconds_of(lambda: a @ b) for _ in range(10))
        return Ceilings(2 * size / copied, 2 * side**3 / multiplied)

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Time one call of `work`, with all that it launches."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def device_seconds(self, work: Callable[[], object], calls: int = 10, rounds: int = 5) -> float:
        """Return the median device time of `work`, from replays of `calls` calls; on a CPU the time of one call."""
        if not self.cuda:
            work()
            return self.seconds_of(work)
        replay = self.captured(lambda: [work() for _ in range(calls)])
        replay()
        seconds = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / calls)
        return statistics.median(seconds)

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record `work` as a CUDA graph, after running it once so that kernels are compiled."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def alive(self) -> bool:
        """Return whether the device still computes: after an illegal access, every call in its context fails."""
        try:
            return torch.ones(1, device=self.device).add(1).item() == 2
        except RuntimeError:
            return False


def release(device: torch.device) -> None:
    """Return unused memory to the device, because pools are sized by its free memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def require_gpu(bench: Bench) -> None:
    """Raise `Stop` if figures would be meaningless: without a GPU, or with attention that is not Triton's."""
    if not bench.cuda:
        if not bench.tiny:
            raise Stop("there is no CUDA device here; --tiny tries the commands without")
        return
    selection = select_backend(bench.device, bench.dtype)
    if selection.backend.name != "triton":
        raise Stop(f"attention is not Triton's but {selection.backend.name}: {selection.reason}")


def need_triton(bench: Bench) -> None:
    """Raise `Skip` if a CPU cannot run the kernels: without Triton, or with a broken interpreter."""
    if find_spec("triton") is None:
        raise Skip("triton is not installed")
    triton, numpy = (tuple(map(int, importlib.metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if not bench.cuda and triton < (3, 7) and numpy >= (2, 4):
        raise Skip("the interpreter of Triton before 3.7 does not work with NumPy from 2.4 on")


def describe(bench: Bench) -> Figures:
    """Return versions, the GPU, what Triton needs to compile, and the measured ceilings."""
    found: Figures = {"device": platform.processor() or "cpu", "python": platform.python_version()}
    found |= {name: version for name in _PACKAGES if (version := _version(name))}
    found |= {"commit": _output("git", "rev-parse", "--short", "HEAD"), "source": _source()}
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    found["compiler"] = (_output(compiler, "--version").splitlines() or [""])[0] if compiler else "none"
    found["python_h"] = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if bench.cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": str(torch.version.cuda),
        }
        fields = "driver_version,memory.used,clocks.sm,clocks.mem,power.limit,temperature.gpu"
        found["nvidia_smi"] = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    ceilings = bench.ceilings
    found |= {"copy_tb_per_s": ceilings.bytes_per_second / 1e12, "tflops": ceilings.flops_per_second / 1e12}
    return found


def _source() -> str:
    """Return a hash of the source code, which identifies it without a repository."""
    root, digest = Path(__file__).parents[3], hashlib.sha256()
    for part in ("model", "loadtest"):
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """Return the output of a command; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
