"""Projections of a network: a `LinearSpec` describes one, a `Linear` computes it.

`LinearFactory` makes each `Linear` once. It is then filled with the tensors that it names, a few rows at a time and in
any order, but scales before the numbers that they multiply; then it is finished. No module is replaced later: each
`Linear` hides its number format, its packing and its ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor, nn

from triptych.model.config.sharding import Index, Range, Shape, Shard, ShardSlice
from triptych.model.errors import ConfigError


class Split(Enum):
    """How ranks divide a projection (Shoeybi et al. 2019, section 3)."""

    WHOLE = "whole"  # every rank has all of it
    OUTPUTS = "outputs"  # a rank computes some of the outputs of every part
    INPUTS = "inputs"  # a rank reads some of the inputs; the sum over ranks is the output
    EXPERTS = "experts"  # a rank has some of the experts, whole; the sum over ranks is the output


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs that are fused with others into one matrix: `count` units (heads, columns) of `width` outputs each.

    Ranks divide the units; no unit is cut.
    """

    count: int
    width: int = 1

    @property
    def outputs(self) -> int:
        return self.count * self.width


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection `x W^T + b`: its name, its sizes, its fused parts, and how ranks divide it.

    `tied_to` names a tensor of another module that is W too. With a `softcap` the outputs are
    `softcap * tanh(y / softcap)` of the projection's y. Of several `experts` W has the matrices of all, one below the
    other, and so has b. An `exact` projection is kept in floats whatever format is asked for; in C
    also if it is stored in integers.
    """

    name: str  # as in decoder.layers.0.attn.qkv
    inputs: int
    outputs: tuple[Part, ...]
    bias: bool = True
    split: Split = Split.WHOLE
    tied_to: str | None = None
    softcap: float | None = None
    experts: int = 1
    exact: bool = False
    block: int = 1  # inputs that stay on one rank together

    def __post_init__(self) -> None:
        if self.softcap is not None and self.split is Split.INPUTS:
            raise ValueError(f"{self.name}: a softcap is of the whole sum, which no rank computes alone")

    @property
    def num_outputs(self) -> int:
        """Rows of W."""
        return self.experts * self.outputs_of_expert

    @property
    def outputs_of_expert(self) -> int:
        return sum(part.outputs for part in self.outputs)

    @property
    def weight(self) -> str:
        """The name of the tensor W."""
        return self.tied_to or f"{self.name}.weight"

    def shard_slice(self, shard: Shard, tensor: TensorShape) -> ShardSlice | None:
        """Return the slice that `shard` has of a tensor of this projection, which is the whole model's; None: all."""
        if shard.size == 1:
            return None
        held = self._held_experts(shard)
        if held is not None:
            rows = self.outputs_of_expert
            return None if tensor.outputs is None else ShardSlice(tensor.outputs, ((held[0] * rows, held[1] * rows),))
        if self.split is Split.OUTPUTS and tensor.outputs is not None:
            return ShardSlice(tensor.outputs, tuple(self._output_ranges(shard)))
        if self.split is Split.INPUTS and tensor.inputs is not None:
            return ShardSlice(tensor.inputs, (self._input_range(shard, tensor.block),))
        return None

    def _held_experts(self, shard: Shard) -> Range | None:
        """Return the experts that `shard` has whole; None if it has some columns of each, or this is no mixture."""
        if self.experts == 1:
            return None
        columns, block = self.inputs, self.block
        if self.split is Split.OUTPUTS:
            columns, block = self.outputs[0].outputs, self.outputs[0].width
        return shard.held_experts(self.experts, columns, block)

    def _input_range(self, shard: Shard, block: int) -> Range:
        first, last = shard.shard_range(self.inputs, self.block)
        if first % block or (last % block and last != self.inputs):
            raise ConfigError(f"{self.name}: {shard.size} ranks cannot divide {self.inputs} inputs, {block} to a scale")
        return first // block, -(-last // block)

    def _output_ranges(self, shard: Shard) -> Iterator[tuple[int, int]]:
        begin = 0
        for part in self.outputs * self.experts:
            first, last = shard.shard_range(part.count)
            yield begin + first * part.width, begin + last * part.width
            begin += part.outputs


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The shape of a tensor that fills a `Linear`, and which dimensions run over its outputs and its inputs.

    One of the latter is for `block` inputs.
    """

    shape: Shape
    outputs: int | None = None
    inputs: int | None = None
    block: int = 1


class Linear(nn.Module):
    """`x W^T + b` of rows x, `[T, inputs]` to `[T, outputs]` in the dtype of x.

    Parameters are allocated when their first rows are filled, in `dtype` and on `device`. Before that, and in a
    network that is only planned, they take no memory.
    """

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.device = device

    def tensors(self) -> Mapping[str, TensorShape]:
        """Return the tensors that fill it, by their names in the network."""
        spec = self.spec
        found = {spec.weight: TensorShape((spec.num_outputs, spec.inputs), outputs=0, inputs=1)}
        if spec.bias:
            found[f"{spec.name}.bias"] = TensorShape((spec.num_outputs,), outputs=0)
        return found

    def reserve(self) -> None:
        """Allocate memory before anything is read; otherwise it would be scattered between the reader's buffers."""

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Copy `values` to the slice `into` of the tensor `name`; each element is filled once."""
        self.parameter(name)[into].copy_(values)

    def parameter(self, name: str) -> Tensor:
        """Return the parameter that is filled as `name`, and allocate it if that was not done."""
        own = name.rpartition(".")[2]
        parameter = self._parameters[own]
        assert parameter is not None
        if parameter.is_meta:
            made = torch.empty(*parameter.shape, dtype=self.kept_dtype(own), device=self.device)
            parameter = self._parameters[own] = nn.Parameter(made, requires_grad=False)
        return parameter.detach()

    def kept_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of its parameter `name`."""
        return self.dtype

    def finish(self) -> None:
        """Do what needs all tensors."""

    def array_specs(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return the dtypes and shapes of the arrays of a filled projection, by name."""
        return {
            name: (self._dtype_of(name, parameter), tuple(parameter.shape))
            for name, parameter in self._parameters.items()
            if parameter is not None
        }

    def filled_arrays(self) -> dict[str, Tensor]:
        """Return the arrays of a filled and finished projection, by name."""
        return {name: self.parameter(name) for name in self.array_specs()}

    def adopt(self, arrays: Mapping[str, Tensor]) -> None:
        """Use read-only arrays of an earlier, filled projection instead of filling its own."""
        for name, array in arrays.items():
            self._parameters[name] = nn.Parameter(array, requires_grad=False)

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the filled projection."""
        return sum(self._nbytes(name, parameter) for name, parameter in self.named_parameters(recurse=False))

    def _nbytes(self, name: str, parameter: Tensor) -> int:
        return parameter.numel() * self._dtype_of(name, parameter).itemsize

    def _dtype_of(self, name: str, parameter: Tensor) -> torch.dtype:
        return self.kept_dtype(name) if parameter.is_meta else parameter.dtype

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def of_experts(self, x: Tensor, starts: Tensor) -> Tensor:
        """Multiply rows x `[R, inputs]`, each by its expert's matrix; return `[R, outputs_of_expert]`.

        The rows of expert e are those from `starts[e]` up to `starts[e + 1]`; `[experts + 1]` int32 on the device of x.
        """
        raise NotImplementedError(f"{self.spec.name}: {type(self).__name__} multiplies by no experts' matrices")


class CompiledLinear(Linear):
    """A projection whose product is compiled for each kind of launch, when that is first run."""

    tiled_rows: ClassVar[tuple[int, ...]]  # the smallest number of rows of each kind of launch
    kernels: bool  # the device has them; otherwise torch multiplies (`reference`)

    @property
    @abstractmethod
    def compiled_for(self) -> Hashable:
        """What its kernels are compiled for, apart from numbers of rows; equal projections share them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return rows `[M, outputs]` of rows `[M, inputs]`, in their dtype; for M = 0 nothing is launched."""
        if len(x) == 0:
            return x.new_empty(0, self.spec.num_outputs)
        return softcapped(self.by_kernels(x) if self.kernels else self.reference(x), self.spec.softcap)

    @abstractmethod
    def by_kernels(self, x: Tensor) -> Tensor:
        """Return the product with its bias, of at least one row, by compiled kernels."""

    @abstractmethod
    def reference(self, x: Tensor) -> Tensor:
        """Return the same product by torch in float32, with which the kernels are compared."""


def softcapped(outputs: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap * tanh(y / softcap)` of outputs y; without a softcap, y."""
    return outputs if softcap is None else torch.tanh(outputs / softcap) * softcap


def linears(module: nn.Module) -> Iterator[Linear]:
    """Yield all projections within a module, but not the parts of a `Linear`."""
    for child in module.children():
        if isinstance(child, Linear):
            yield child
        else:
            yield from linears(child)


# -- The tiles into which a launch of a Triton product is cut.

FEW = 16  # rows of the smallest tile: the least that tensor cores multiply
SEVERAL = 64  # rows of the next one


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program multiplies `rows` rows, for `outputs` columns of the result, in steps of `inputs` inputs.

    `warps` compute it, and `stages` steps are read ahead, as Triton's launch options of these names say.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
