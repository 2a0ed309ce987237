"""The one place where projections are made: which number format, which kernels, over which ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from triptych.model.config.formats import FLOAT, NumberFormat, NumberKind, Storage, kept_as_stored, nearest_kept
from triptych.model.config.sharding import WHOLE, Index, Range, Shard
from triptych.model.linear.base import CompiledLinear, Linear, LinearSpec, Split, TensorShape
from triptych.model.linear.float import (
    DequantizedExpertsLinear,
    DequantizedLinear,
    ExpertsLinear,
    FloatLinear,
    TiedLinear,
)
from triptych.model.linear.fp8 import Fp8Linear, keeps
from triptych.model.linear.integers import integer_linear
from triptych.model.linear.native import native_linear
from triptych.model.native.library import Library
from triptych.model.system import kernel_faults
from triptych.model.system.kernel_faults import Faults

# -- Projections in which each rank multiplies some of the inputs.


class Collective(Protocol):
    """What ranks compute together; each call is made by all of them."""

    @property
    def shard(self) -> Shard:
        """Which rank this is, of how many."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place or in a new one; the same bits on each."""

    def concatenate(self, part: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Join the columns `[N, last - first]` of every rank to `[N, V]`."""

    def stack(self, part: Tensor) -> Tensor:
        """Stack the numbers `[N]` of every rank to `[ranks, N]`."""


class ParallelLinear(Linear):
    """`x W^T + b` where a rank has some of the columns of x and of W, and every rank the whole of b."""

    def __init__(self, spec: LinearSpec, product: Linear, collective: Collective) -> None:
        """`product` is this rank's part of `x W^T`, in whatever number format."""
        super().__init__(spec, product.dtype, product.device)
        self.product = product
        self.bias = nn.Parameter(torch.empty(spec.num_outputs)) if spec.bias else None
        self.collective = collective

    def tensors(self) -> Mapping[str, TensorShape]:
        return {**super().tensors(), **self.product.tensors()}

    def reserve(self) -> None:
        self.product.reserve()

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        if name in self.product.tensors():
            self.product.fill(name, into, values)
        else:
            super().fill(name, into, values)

    def finish(self) -> None:
        self.product.finish()

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + (0 if self.bias is None else self._nbytes("bias", self.bias))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.collective.sum(self.product(x))
        return whole if self.bias is None else whole + self.bias


CPU = torch.device("cpu")
_EXACT = NumberFormat(NumberKind.FLOAT32, NumberKind.FLOAT32)


@dataclass(frozen=True)
class LinearFactory:
    """Makes every `Linear` of a network; by default torch's, in float32 on the CPU."""

    dtype: torch.dtype = torch.float32  # of the network: of what is not quantised, and of hidden states
    device: torch.device = CPU
    native: tuple[tuple[str, NumberFormat], ...] = ()  # what C computes: patterns of names, the first that fits
    library: Library | None = None  # None, with `native`: for sizes alone
    quantization: str = "none"  # the setting that asks for the formats in `native` or `integers`
    # By name, what the checkpoint does not have as floats.
    stored_as: Mapping[str, Storage] = field(default_factory=dict)
    # Patterns of names of what torch keeps in fp8, in addition to what is stored in fp8; None: nothing.
    fp8: tuple[str, ...] | None = None
    # The same of what torch keeps in integers, and how, with activations as they are.
    integers: tuple[tuple[str, NumberFormat], ...] | None = None
    collective: Collective | None = None  # the ranks that share the network; None: there is one
    faults: Faults = field(default_factory=dict)  # kernels that are broken here: torch multiplies instead
    prefix: str = ""  # of the names in the specs that it is given

    def __call__(self, spec: LinearSpec, tied: Callable[[], Tensor] | None = None) -> Linear:
        """The projection that `spec` asks for; `tied` gives the tensor that `spec.tied_to` names."""
        spec = replace(spec, name=self.prefix + spec.name)
        if spec.split is Split.INPUTS and self.collective is not None:
            if spec.experts > 1:  # the sum over a token's experts includes the ranks' parts
                return self._local(replace(spec, bias=spec.bias and self.shard.rank == 0), tied)
            return ParallelLinear(spec, self._local(replace(spec, bias=False), tied), self.collective)
        return self._local(spec, tied)

    def _local(self, spec: LinearSpec, tied: Callable[[], Tensor] | None) -> Linear:
        """What this rank computes by itself."""
        stored_as = self.stored_as.get(spec.name, FLOAT)
        for pattern, number_format in self.native:
            if fnmatchcase(spec.name, pattern):
                kept = replace(_EXACT, stored_as=stored_as) if spec.exact else self._kept(number_format, stored_as)
                return native_linear(kept, spec, self.dtype, self.library)
        if spec.experts > 1:  # in floats: who asks for less is refused before (`engine.integer_settings`)
            kind = kernel_faults.EXPERTS
            if stored_as.scale is None:
                return self._checked(ExpertsLinear(spec, self.dtype, self.device), kind)
            return self._checked(DequantizedExpertsLinear(spec, self.dtype, self.device, stored_as), kind)
        as_integers = self._in_integers(spec, stored_as)
        if as_integers is not None:
            made = integer_linear(spec, self.dtype, self.device, as_integers, stored_as)
            return self._checked(made, kernel_faults.INTEGERS)
        if spec.tied_to is not None:
            assert tied is not None
            return TiedLinear(spec, self.dtype, self.device, tied)
        if self._in_fp8(spec, stored_as):
            return self._checked(Fp8Linear(spec, self.dtype, self.device, stored_as), kernel_faults.FP8)
        if stored_as.scale is None:
            return FloatLinear(spec, self.dtype, self.device)
        return DequantizedLinear(spec, self.dtype, self.device, stored_as)

    def _checked(self, made: CompiledLinear | ExpertsLinear, kind: str) -> Linear:
        """The projection, multiplied by torch if the kernels of its kind are broken here."""
        made.kernels = made.kernels and kind not in self.faults
        return made

    def _kept(self, number_format: NumberFormat, stored_as: Storage) -> NumberFormat:
        """What C keeps: as it is stored if it can be, else what is asked for, else what is nearest."""
        return self._as_stored(stored_as) or replace(number_format, stored_as=stored_as)

    def _as_stored(self, stored_as: Storage) -> NumberFormat | None:
        """The integers that are kept because they are stored; None: those that are asked for, if any."""
        nearest = nearest_kept(stored_as) if self.quantization == "none" else None
        return kept_as_stored(stored_as) or nearest

    def _in_fp8(self, spec: LinearSpec, stored_as: Storage) -> bool:
        if self.fp8 is None or not keeps(stored_as):
            return False
        return stored_as != FLOAT or (not spec.exact and any(fnmatchcase(spec.name, pattern) for pattern in self.fp8))

    def _in_integers(self, spec: LinearSpec, stored_as: Storage) -> NumberFormat | None:
        if self.integers is None:
            return None
        patterns = () if spec.exact else self.integers
        asked = (kept for pattern, kept in patterns if fnmatchcase(spec.name, pattern))
        return self._as_stored(stored_as) or next(asked, None)

    def within(self, name: str) -> LinearFactory:
        """The same for the projections of the module `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def quantized(self) -> bool:
        """Whether any matrix is kept in fewer bits than the network computes in."""
        return bool(self.fp8) or self.quantization != "none"

    def __str__(self) -> str:
        """The number format by the setting that asks for it."""
        if not self.quantized:
            return f"dtype {str(self.dtype).removeprefix('torch.')}"
        return "quantization fp8" if self.fp8 else f"quantization {self.quantization}"

    @property
    def shard(self) -> Shard:
        """Which rank the network is for."""
        return WHOLE if self.collective is None else self.collective.shard
