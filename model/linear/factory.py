"""Makes every projection: chooses its number format, its kernels and its part on each rank."""

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
    """Operations over all ranks; every rank makes each call."""

    @property
    def shard(self) -> Shard:
        """This rank, and the number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, in place or in a new tensor; each rank gets the same bits."""

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
    native: tuple[tuple[str, NumberFormat], ...] = ()  # what C computes: the first pattern that fits a name counts
    library: Library | None = None  # None, with `native`: only sizes are computed
    quantization: str = "none"  # the setting from which the formats in `native` or `integers` follow
    # The formats of tensors that the checkpoint does not store as floats, by name.
    stored_as: Mapping[str, Storage] = field(default_factory=dict)
    # Patterns of names of projections to keep in fp8, in addition to those stored so; None: none is.
    fp8: tuple[str, ...] | None = None
    # Likewise of projections to keep in integers, and in which; activations stay floats.
    integers: tuple[tuple[str, NumberFormat], ...] | None = None
    collective: Collective | None = None  # the ranks that share the network; None: there is one
    faults: Faults = field(default_factory=dict)  # broken kernels, which torch replaces
    prefix: str = ""  # of the names in specs

    def __call__(self, spec: LinearSpec, tied: Callable[[], Tensor] | None = None) -> Linear:
        """Return the projection of `spec`; `tied` returns the tensor that `spec.tied_to` names."""
        spec = replace(spec, name=self.prefix + spec.name)
        if spec.split is Split.INPUTS and self.collective is not None:
            if spec.experts > 1:  # the sum over a token's experts includes the ranks' parts
                return self._local(replace(spec, bias=spec.bias and self.shard.rank == 0), tied)
            return ParallelLinear(spec, self._local(replace(spec, bias=False), tied), self.collective)
        return self._local(spec, tied)

    def _local(self, spec: LinearSpec, tied: Callable[[], Tensor] | None) -> Linear:
        """Return the projection that this rank computes by itself."""
        stored_as = self.stored_as.get(spec.name, FLOAT)
        for pattern, number_format in self.native:
            if fnmatchcase(spec.name, pattern):
                kept = replace(_EXACT, stored_as=stored_as) if spec.exact else self._kept(number_format, stored_as)
                return native_linear(kept, spec, self.dtype, self.library)
        if spec.experts > 1:  # in floats: other formats were refused before
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
        """Return the projection; if the kernels of its kind are broken here, torch multiplies."""
        made.kernels = made.kernels and kind not in self.faults
        return made

    def _kept(self, number_format: NumberFormat, stored_as: Storage) -> NumberFormat:
        """Return the format that C keeps: the stored one if it can, else the requested one."""
        return self._as_stored(stored_as) or replace(number_format, stored_as=stored_as)

    def _as_stored(self, stored_as: Storage) -> NumberFormat | None:
        """Return the integer format to keep because the checkpoint has it, or one near it; None: the requested one."""
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
        """Return the factory for the projections of the module `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def quantized(self) -> bool:
        """Whether any matrix is kept in fewer bits than the network computes in."""
        return bool(self.fp8) or self.quantization != "none"

    def __str__(self) -> str:
        """Name the setting that requests the number format."""
        if not self.quantized:
            return f"dtype {str(self.dtype).removeprefix('torch.')}"
        return "quantization fp8" if self.fp8 else f"quantization {self.quantization}"

    @property
    def shard(self) -> Shard:
        """The rank that has the network."""
        return WHOLE if self.collective is None else self.collective.shard
