"""Launch Triton kernels cheaply: compiled variants are held. Import this module only if Triton is installed.

For each launch Triton binds, specialises, prints and hashes all arguments, which takes the host 10 us and more.
A held kernel looks its variant up by a key that is never coarser than Triton's own: the constants and options, the
type of each tensor and its address modulo 16, of each integer whether it is 1, its last four bits and its width.
Triton launches what a key is not known for, so Triton alone decides what a variant is.

The code of a kernel's launches is made when a launch shows which arguments are tensors, integers and floats, as
Triton makes code that binds arguments. Floats and the values of integers are passed with each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# How the launcher in C is called, by Triton's version: `_front` and `_back` belong to the variant. With any other
# version all launches take Triton's path.
_CALLS = {
    "3.6": "_launcher(_x, _y, _z, _stream, *_front, None, None, _metadata, None, None, None, {values})",
    "3.7": "_launcher(_x, _y, _z, _stream, *_front, _metadata, None, None, None, None, None, *_back, ({values},))",
}
_VERSION = ".".join(triton.__version__.split(".")[:2])
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_UNSET = object()  # an option that a launch does not name
_BITS = ~0x7FFFFFF0  # of an integer the last four, and those beyond the 31 that fit into 32 with a sign

_SOURCE = """
def _launch(grid, {names}, num_warps=_unset, num_stages=_unset, enable_fp_fusion=_unset, **_others):
    _options = (num_warps, num_stages, enable_fp_fusion)
    try:
        {addresses}
        _on = {first}.get_device()
    except AttributeError:
        return _by_triton(None, grid, ({names},), _options, _others)
    if not ({known}) or _others or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
        return _by_triton(None, grid, ({names},), _options, _others)
    if _on >= 0 and _on != _current_device():
        with _device(_on):
            return _launch(grid, {names}, *_options)
    _key = (_on, *_options, {key})
    _variant = _variants.get(_key)
    if _variant is None:
        return _by_triton(_key, grid, ({names},), _options, _others)
    _launcher, _front, _metadata, _back = _variant
    _x, _y, _z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    _stream = _current_stream(_on)
    {call}
"""


def cdiv(number: int, size: int) -> int:
    """Return `number / size`, rounded up. Triton's own function takes 5 us."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not less than `number`. Triton's own function takes 5 us."""
    return 1 << (number - 1).bit_length()


_ALONE = {"OVERLAP": False}
_OVERLAPPED = {"OVERLAP": True, "launch_pdl": True}
_begins_early = False


def overlap() -> Mapping[str, bool]:
    """Return how to launch a kernel that may begin before the one before it has ended (`overlapping`).

    OVERLAP is a constant of the kernel. If it is true, the kernel lets the next one begin at once, and waits for the
    one before it before it reads what that one wrote, and before it writes anything.
    """
    return _OVERLAPPED if _begins_early else _ALONE


def can_overlap(device: torch.device) -> bool:
    """Return whether a device lets kernels begin early: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    """Let kernels that are launched inside begin early, if `wanted`.

    It saves a microsecond or two of each of the hundreds of kernels of a decode step (programmatic dependent launch,
    CUDA C++ programming guide). Steps are recorded inside: such kernels are launched by Triton's own path.
    """
    global _begins_early
    before, _begins_early = _begins_early, wanted
    try:
        yield
    finally:
        _begins_early = before


def held(kernel: Any) -> Any:
    """Hold the variants of a `triton.jit` kernel; a kernel of the interpreter is returned as it is."""
    if type(kernel) is not triton.JITFunction:
        return kernel
    return HeldKernel(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
    )


class HeldKernel(triton.JITFunction):  # type: ignore[misc]
    """A Triton kernel that is launched as any other: `kernel[grid](...)`. A launch's tensors lie on one device."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__(function, **settings)
        self.variants: dict[Any, Any] = {}  # what launches each variant, by key
        self._kinds: dict[str, type | None] = {p.name: None for p in self.params if not p.is_constexpr}
        self._launch: Callable[..., None] = self._first

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _first(self, grid: Any, *values: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in list(named) if name not in self.signature.parameters}
        bound = self.signature.bind(*values, **named)
        self._by_triton(None, grid, bound.args, (), options)

    def _by_triton(
        self, key: Any, grid: Any, values: tuple[Any, ...], options: tuple[Any, ...], others: Mapping[str, Any]
    ) -> None:
        """Take Triton's path, then hold what it launched by `key`; without a key learn what kinds of values there are.

        `options` are those of `_OPTIONS`.
        """
        given = {name: value for name, value in zip(_OPTIONS, options, strict=False) if value is not _UNSET}
        on = next((value for value in values if isinstance(value, Tensor)), None)
        with torch.cuda.device_of(on):
            kernel = self.run(*values, grid=grid, warmup=False, **given, **others)
        if key is None:
            self._learn(values)
        elif (variant := _variant(kernel)) is not None and not self.pre_run_hooks:
            self.variants[key] = variant

    def _learn(self, values: tuple[Any, ...]) -> None:
        """Make the code of launches, again if an argument that has been None in all launches is not in this one."""
        kinds = dict(self._kinds)
        for parameter, value in zip(self.params, values, strict=True):
            if not parameter.is_constexpr and kinds[parameter.name] is None:
                kinds[parameter.name] = _kind(value)
        if kinds != self._kinds and Tensor in kinds.values() and _VERSION in _CALLS:
            self._kinds, self.variants = kinds, {}
            active = driver.active
            names = {
                "_variants": self.variants,
                "_by_triton": self._by_triton,
                "_unset": _UNSET,
                "_device": torch.cuda.device,
                "_runtime": knobs.runtime,
                "_current_device": active.get_current_device,
                "_current_stream": active.get_current_stream,
            }
            exec(self._code(), names)
            self._launch = names["_launch"]

    def _code(self) -> str:
        """Return the Python code that launches, for arguments of the kinds that are known."""
        names = [p.name for p in self.params]
        assert not any(name.startswith("_") for name in names), "names of the launch's own begin so"
        tensors, integers, floats, missing = (
            [p for p in self.params if not p.is_constexpr and self._kinds[p.name] is kind]
            for kind in (Tensor, int, float, None)
        )
        addresses = [
            f"_at_{p.name}, _type_{p.name} = (0, None) if {p.name} is None else ({p.name}.data_ptr(), {p.name}.dtype)"
            for p in tensors
        ]
        known = [
            *(f"{p.name}.__class__ is int" for p in integers),
            *(f"{p.name}.__class__ is float" for p in floats),
            *(f"{p.name} is None" for p in missing),
        ]
        specialised = [f"_at_{p.name}" for p in tensors if not p.do_not_specialize_on_alignment]
        alignment = f"({' | '.join(specialised)}) & 15 and ({', '.join(f'{at} & 15' for at in specialised)},)"
        key = [
            *(f"_type_{p.name}" for p in tensors),
            *([alignment] if specialised else []),
            *(_integer_key(p) for p in integers),
            *(p.name for p in self.params if p.is_constexpr),
        ]
        values = [f"_at_{p.name}" if p in tensors else p.name for p in self.params]
        return _SOURCE.format(
            names=", ".join(names),
            addresses="\n        ".join(addresses),
            first=tensors[0].name,
            known=" and ".join(known) or "True",
            key=", ".join(key),
            call=_CALLS[_VERSION].format(values=", ".join(values)),
        )


def _kind(value: Any) -> type | None:
    if isinstance(value, Tensor):
        return Tensor
    return type(value) if type(value) in (int, float) else None  # of others, bool among them, launches are Triton's


def _integer_key(parameter: Any) -> str:
    """Return the code of what Triton specialises an integer by: its width, and unless told otherwise 1 and 16."""
    name = parameter.name
    if parameter.do_not_specialize:
        return f"{name} >> 31"
    return f"{name} if {name} == 1 else {name} & {_BITS} | 16"  # bit 4 is not in _BITS: nothing else becomes 1


def _variant(kernel: Any) -> tuple[Any, ...] | None:
    """Return what launches a compiled kernel: the launcher in C and what it wants before and after; None: unknown."""
    launcher: Any = getattr(kernel, "_run", None)
    try:
        if kernel.metadata.target.backend != "cuda" or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        front = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        back = () if _VERSION == "3.6" else (launcher.arg_annotations, launcher.kernel_signature)
        return launcher.launch, front, kernel.packed_metadata, back
    except AttributeError:  # a kernel that was compiled and not launched, or a launcher of another kind
        return None
