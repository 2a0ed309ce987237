"""What the layers of a stack share in one step: the rows' metadata, and positions that are computed once."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.cache.states import StateTables, whole_segments
from model.config.layer import RopeScaling, RotaryConfig
from model.linear.base import Linear
from model.network.disentangled import RelativeTable
from model.network.fused_ops import rotary_tables
from model.network.inputs import CrossInput, StackInput
from model.network.rotary import query_growth, sinusoids_of_distances
from model.network.score_bias import BucketBias, StepBias
from model.system.transfer import device_tensor


class StepContext:
    """One step of one stack; layers that ask for the same positions get the same tensors."""

    def __init__(
        self,
        inputs: StackInput,
        backend: AttentionBackend,
        cross: CrossInput | None,
        dtype: torch.dtype,
        shared_bias: BucketBias | None = None,
        relative: RelativeTable | None = None,
        key_owners: frozenset[int] = frozenset(),
        layer_vectors: Tensor | None = None,
    ) -> None:
        """`dtype` is that of the rows; `shared_bias` and `relative` are the stack's tables of positions, `key_owners`
        the layers whose keys others read, and `layer_vectors` `[T, L, P]` each row's vectors for the layers."""
        self.inputs, self.backend, self.cross = inputs, backend, cross
        self.shared_bias = StepBias(shared_bias) if shared_bias is not None else None
        self.layer = 0  # which is being computed, where no runner does
        self.key_owners = key_owners
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values `[T, K, D]` of these, without a cache
        self.layer_vectors = layer_vectors
        self._relative = relative
        self._dtype = dtype
        self._rotaries: dict[RotaryConfig, tuple[Tensor, Tensor]] = {}
        self._growths: dict[RotaryConfig, Tensor] = {}
        self._sinusoids: dict[int, Tensor] = {}
        self._state_tables: dict[bool, StateTables] = {}

    def keep_queries(self, query: Tensor) -> None:
        """Keep a layer's queries of cross attention `[T, H, D]`, if they are asked for."""
        kept = self.cross.queries if self.cross is not None else None
        if kept is not None and self.layer in kept:
            kept[self.layer].copy_(query)

    @cached_property
    def relative_table(self) -> Tensor:
        """`[2 span, d]` of relative positions (DeBERTa)."""
        assert self._relative is not None
        table: Tensor = self._relative()
        return table

    def project(self, linear: Linear, x: Tensor) -> Tensor:
        """Return `linear(x)`, with what the rows' adapters add to it."""
        y: Tensor = linear(x)
        adapters = self.inputs.adapters
        return y if adapters is None else adapters.added(linear.spec.name, x, y)

    def rotary(self, config: RotaryConfig) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[T, 1, R]` of the rows' positions, for `model.network.rotary.rotate`."""
        if config not in self._rotaries:
            long = config.scaling is RopeScaling.LONGROPE
            contexts = self._contexts if long else None
            self._rotaries[config] = rotary_tables(config, self.inputs.positions, self._dtype, contexts)
        return self._rotaries[config]

    def query_growth(self, config: RotaryConfig) -> Tensor:
        """What the rows' queries are multiplied by, `[T]` float32."""
        if config not in self._growths:
            self._growths[config] = query_growth(config, self.inputs.positions)
        return self._growths[config]

    @cached_property
    def _contexts(self) -> Tensor:
        """`[T]`"""
        if self.inputs.contexts is not None:
            return self.inputs.contexts
        metadata = self.inputs.metadata
        rows = [length for length in metadata.q_lens for _ in range(length)]
        return device_tensor(rows, self.inputs.positions.device, torch.int64)

    def state_tables(self, chunk: int, *, kept: bool) -> StateTables:
        """Which rows go on from which states, on the device; `kept`: there is a cache, else all begin with zeros."""
        if kept not in self._state_tables:
            inputs = self.inputs
            if kept and inputs.single_states is not None:
                self._state_tables[kept] = StateTables(inputs.single_states)
            else:
                spans = inputs.states if kept else whole_segments(inputs.metadata.q_lens)
                self._state_tables[kept] = StateTables.of(spans, chunk, inputs.positions.device)
        return self._state_tables[kept]

    def sinusoids(self, length: int, size: int, dtype: torch.dtype) -> Tensor:
        """`[2 length - 1, size]` of the distances from `1 - length` to `length - 1` (XLNet)."""
        if length not in self._sinusoids:
            self._sinusoids[length] = sinusoids_of_distances(length, size, self.inputs.positions.device).to(dtype)
        return self._sinusoids[length]
