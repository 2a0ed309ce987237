"""A GPU that is not there: Triton compiles for it, and launches on it compute nothing.

Tensors lie on torch's meta device, so a model of any size needs no memory. Imported only if Triton is installed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

# Bytes of shared memory that a block may use, by compute capability: table "Technical Specifications per Compute
# Capability" of the CUDA programming guide.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled variant of a kernel."""

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    metadata: dict[str, Any]
    files: dict[str, str]  # by ending: ttgir, ptx, cubin, ...
    from_cache: bool

    def text(self, ending: str) -> str:
        return Path(self.files[ending]).read_text()

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return int(self.metadata["shared"])

    def resources(self) -> tuple[int, int]:
        """Return registers of a thread and bytes of its stack: what it spills, if it has no local arrays."""
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", self.files["cubin"]]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert found is not None, told
        return int(found[1]), int(found[2])

    def machine_code(self) -> str:
        command = [str(_TOOLS / "cuobjdump"), "-sass", self.files["cubin"]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Utils:
    """What Triton asks of CUDA."""

    def __init__(self, capability: int) -> None:
        self._shared = SHARED_MEMORY[capability]

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._shared,
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return a module, a function, registers, spilt registers and the most threads of a block."""
        return 0, 0, 0, 0, 1024


class _Launcher:
    """Launches nothing. It has what `triptych.model.system.held_kernels` reads of Triton's launcher, so variants are
    held.
    """

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations: tuple[object, ...] = ()
    kernel_signature = b""

    def __call__(self, *arguments: object) -> None: ...

    def launch(self, *arguments: object) -> None: ...


class PretendedDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver of a GPU of one compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = _Utils(capability)

    @staticmethod
    def is_active() -> bool:
        return True

    def launcher_cls(self, source: object, metadata: object) -> _Launcher:
        return _Launcher()

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_interface(self) -> object:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> object:
        raise NotImplementedError

    def clear_cache(self, cache: object) -> None: ...


def pretend(capability: int) -> None:
    """Let this process's Triton see one GPU of `capability`, such as 90. Only in a process without TRITON_INTERPRET."""
    if capability not in SHARED_MEMORY:
        known = ", ".join(map(str, SHARED_MEMORY))
        raise ValueError(f"capability {capability} is not known; known are {known}")
    driver.set_active(PretendedDriver(capability))


def take_meta_for_gpu(capability: int) -> None:
    """Let this process's meta tensors pass for a GPU's where a network asks a tensor, so that it launches kernels."""
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)


@contextmanager
def compiled() -> Iterator[list[Compiled]]:
    """Yield a list that gets each variant that is compiled in the block, or read from Triton's cache."""
    found: list[Compiled] = []
    before = knobs.compilation.listener

    def note(
        *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: object, cache_hit: bool
    ) -> None:
        names = src.fn.arg_names
        constants = {_named(at, names): value for at, value in src.constants.items()}
        files = {Path(name).suffix[1:]: path for name, path in metadata_group.items()}
        found.append(Compiled(src.fn.__name__, src.signature, constants, metadata, files, cache_hit))

    knobs.compilation.listener = note
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def _named(at: Any, names: list[str]) -> str:
    place = at[0] if isinstance(at, tuple) else at
    return names[place] if isinstance(place, int) else str(place)
