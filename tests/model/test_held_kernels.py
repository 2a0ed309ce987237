"""Held kernels launch what Triton's own path launches, with the same arguments."""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from triptych.model.system import held_kernels
from triptych.model.system.held_kernels import HeldKernel, held

pytestmark = pytest.mark.skipif(held_kernels._VERSION not in held_kernels._CALLS, reason="Triton's path is taken")

ROOT = Path(__file__).parents[2]
SETTINGS = {"do_not_specialize": ["rows"], "do_not_specialize_on_alignment": ["gain"]}
launches: list[tuple[Any, ...]] = []


def kernel(x, gain, out, width, rows, eps, stride, BLOCK, KIND):  # type: ignore[no-untyped-def] # never compiled
    pass


kernel.__annotations__ |= {"BLOCK": "tl.constexpr", "KIND": "tl.constexpr"}


class Driver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, device: int = 0) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7


def address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Compiled:
    """A stand-in for a compiled kernel, and for its launcher in C: both note the launch."""

    def __init__(self, key: str, signature: dict[str, str]) -> None:
        self.key, self.signature = key, signature
        self.metadata = SimpleNamespace(target=GPUTarget("cuda", 90, 32))
        self.function, self.packed_metadata = id(self), (4, 1, 0)
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.arg_annotations, self.kernel_signature = ["annotations"], b"signature"
        self._run = self

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        self.note((x, y, z), stream, given[4:])

    def launch(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        assert given[:3] == (self.function, False, True)
        if held_kernels._VERSION == "3.6":
            assert given[3:9] == (None, None, self.packed_metadata, None, None, None)
            return self.note((x, y, z), stream, given[9:])
        assert given[3:9] == (self.packed_metadata, None, None, None, None, None)
        assert given[9:11] == (self.arg_annotations, self.kernel_signature)
        return self.note((x, y, z), stream, given[11])

    def note(self, grid: tuple[int, ...], stream: int, values: tuple[Any, ...]) -> None:
        kinds = self.signature.values()
        passed = [address(v) for v, kind in zip(values, kinds, strict=True) if kind != "constexpr"]
        launches.append((self.key, grid, stream, passed))


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(self: Any, key: str, signature: Any, device: int, *_: object) -> Compiled:
        self.device_caches[device][0][key] = Compiled(key, signature)
        return self.device_caches[device][0][key]

    monkeypatch.setattr(triton.JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(driver, "_active", Driver())
    launches.clear()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry for each launch by Triton's own path."""
    seen: list[str] = []
    run = triton.JITFunction.run

    def counting(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(type(self).__name__)
        return run(self, *args, **named)

    monkeypatch.setattr(triton.JITFunction, "run", counting)
    return seen


def test_random_launches_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare variant, grid, stream and arguments over addresses, widths, values and options of all kinds."""
    chosen, plain, own = random.Random(0), triton.JITFunction(kernel, **SETTINGS), HeldKernel(kernel, **SETTINGS)
    by_triton = counted(monkeypatch)
    buffers = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
    integers = (0, 1, 2, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31), -(2**31) - 1, 2**40, 2**63)

    def tensor() -> torch.Tensor:
        return buffers[chosen.choice(list(buffers))][chosen.choice((0, 0, 0, 1, 4, 8)) :]

    for turn in range(4000):
        few = turn % 4 > 0  # of few kinds, so that most have been launched before
        x, gain, out = tensor(), tensor(), tensor()
        if few:
            x, gain, out = buffers[torch.float32], chosen.choice((None, gain)), buffers[torch.bfloat16]
        width, stride = (chosen.choice((48, 1) if few else integers) for _ in range(2))
        numbers = (width, chosen.choice(integers), chosen.choice((0.0, 1e-6, 1.0)), stride)
        grid = chosen.choice(((3,), (2, 5), (2, 3, 4)))
        named = {"BLOCK": 16, "KIND": chosen.choice((0, 0.0, True, "ieee", torch.bfloat16))}
        if not few:
            named |= chosen.choice(({}, {"num_warps": 8}, {"num_stages": 2, "enable_fp_fusion": False}, {"maxnreg": 6}))
        plain[grid](x, gain, out, *numbers, **named)
        own[grid](x, gain, out, *numbers, **named)
        expected, found = launches[-2:]
        assert found == expected, (x.dtype, gain, numbers, named)
    assert launches[-1][-1][0] == buffers[torch.float32].data_ptr()
    assert by_triton.count("JITFunction") == 4000
    assert by_triton.count("HeldKernel") < 3000
    assert len(launches) == 8000


def test_one_variant_asks_triton_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the first launch shows the kinds of arguments, the second is held, and floats do not go stale."""
    own, by_triton, x = HeldKernel(kernel, **SETTINGS), counted(monkeypatch), torch.zeros(64)
    for turn in range(9):
        own[(turn,)](x, None, x[16:], 64, turn, turn / 8, 16, BLOCK=16, KIND=0, num_warps=4)
    assert by_triton == ["HeldKernel"] * 2
    assert [passed[-2] for *_, passed in launches] == [turn / 8 for turn in range(9)]
    assert [grid for _, grid, *_ in launches] == [(turn, 1, 1) for turn in range(9)]


def test_argument_that_was_none_or_of_another_type_is_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    own, by_triton, x = HeldKernel(kernel, **SETTINGS), counted(monkeypatch), torch.zeros(64)
    usual = {"gain": None, "width": 64, "eps": 1.0}
    for change in ({}, {}, {"gain": x}, {"gain": x}, {"width": True}, {"eps": 1}, {"x": 4096}, {"gain": x}, {}):
        by_name = {"x": x, **usual, **change}
        own[(1,)](by_name["x"], by_name["gain"], x, by_name["width"], 1, by_name["eps"], 16, BLOCK=16, KIND=0)
    own[(1,)](x, x, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    assert len(by_triton) == 8  # two, two for a tensor in the place of None, three other types, one of None again
    assert all("*fp32" in key for key, *_ in launches)


def test_hooks_of_a_profiler_are_called_by_triton_s_path(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = HeldKernel(kernel, **SETTINGS), torch.zeros(64)
    for _ in range(2):
        own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    by_triton = counted(monkeypatch)
    own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    assert by_triton == ["HeldKernel"]


def test_tensors_of_another_device_are_launched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfSecond(torch.Tensor):
        def get_device(self) -> int:
            return 1

    @contextmanager
    def second(_: object) -> Iterator[None]:
        here.device = 1
        yield
        here.device = 0

    here = Driver()
    streams: list[tuple[int, int]] = []
    monkeypatch.setattr(here, "get_current_stream", lambda device: streams.append((device, here.device)) or 7)
    monkeypatch.setattr(driver, "_active", here)
    monkeypatch.setattr(torch.cuda, "device", second)
    monkeypatch.setattr(torch.cuda, "device_of", second)
    own, by_triton, x = HeldKernel(kernel, **SETTINGS), counted(monkeypatch), torch.zeros(64).as_subclass(OfSecond)
    for _ in range(4):
        own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
        assert here.device == 0
    assert len(by_triton) == 2
    assert streams == [(1, 1)] * 4  # of the second device, while it is the current one
    assert list(own.device_caches) == [1]


def test_other_versions_of_triton_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = held(triton.JITFunction(kernel, **SETTINGS)), torch.zeros(64)
    assert type(own) is HeldKernel
    monkeypatch.setattr(held_kernels, "_VERSION", "3.8")
    by_triton = counted(monkeypatch)
    for _ in range(3):
        own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    assert len(by_triton) == 3
    assert not own.variants


def test_what_an_unknown_launcher_launches_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = HeldKernel(kernel, **SETTINGS), torch.zeros(64)
    monkeypatch.setattr(Compiled, "launch", property())
    by_triton = counted(monkeypatch)
    for _ in range(3):
        own[(1,)](x, None, x, 64, 1, 1.0, 16, BLOCK=16, KIND=0)
    assert len(by_triton) == 3
    assert not own.variants


def test_every_kernel_that_is_launched_is_held() -> None:
    """Read the source: `name[grid](...)` launches the kernel `name`. The self-check launches its own only once."""
    files = [file for file in sorted((ROOT / "model").rglob("*.py")) if file.parent.name != "kernel_check"]
    trees = [ast.parse(file.read_text()) for file in files]
    launched = {
        node.func.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    decorated = {
        node.name: [ast.unparse(one) for one in node.decorator_list]
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    kernels = {name: found for name, found in decorated.items() if any("triton.jit" in one for one in found)}
    assert len(launched & kernels.keys()) > 15
    assert [name for name in launched & kernels.keys() if kernels[name][0] != "held"] == []


# What kernels read before the ones before them have ended: lengths, which are copied before a graph, and weights.
READ_EARLY = {
    "attend": {"tl.load(cu_seqlens_q + segment + 1)", "tl.load(cu_seqlens_q)", "tl.load(kv_lens + segment)"}
    | {"tl.load(cu_seqlens_q + segment)", "_segment_of(cu_seqlens_q, num_segments, tile, TILE_Q)"},
    "one_row": {"tl.load(rows, mask=there[:, None] & (k < K)[None, :], other=0.0)"},
}


def test_kernels_that_begin_early_wait_before_they_write() -> None:
    """Read the source: each kernel with OVERLAP waits, and what it calls before that only computes or reads this."""
    kernels = {
        node.name: node
        for file in sorted((ROOT / "model").rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and "OVERLAP" in {one.arg for one in node.args.args}
    }
    assert len(kernels) >= 7
    harmless = re.compile(r"gdc_launch_dependents|tl\.(program_id|num_programs|arange|zeros)|.*\.to$")
    for name, kernel in kernels.items():
        waits = [place for place, one in enumerate(kernel.body) if "gdc_wait()" in ast.unparse(one)]
        assert len(waits) == 1, f"{name} waits in every program, once"
        wait = kernel.body[waits[0]]
        assert isinstance(wait, ast.If) and ast.unparse(wait.test) == "OVERLAP" and not wait.orelse, name
        before = [call for one in kernel.body[: waits[0]] for call in ast.walk(one) if isinstance(call, ast.Call)]
        read = {ast.unparse(call) for call in before if not harmless.fullmatch(ast.unparse(call.func))}
        assert read == READ_EARLY.get(name, set()), name


@pytest.mark.slow  # it compiles Triton's driver and some ten kernels
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no GCC here")
def test_triton_s_launcher_in_c_takes_held_launches(tmp_path: Path) -> None:
    """Run Triton's own launcher over a stand-in for libcuda: each argument arrives as by Triton's path."""
    library = tmp_path / "libcuda.so.1"
    source = ROOT / "tests/model/libcuda_stub.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.model.launched", str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    launches, variants, keys = map(int, done.stdout.split())
    assert launches > 3 * keys  # most launches were held
    assert 20 < variants <= keys
