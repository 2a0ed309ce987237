"""Backends by layer: recurrent layers, and different backends for the layers of one model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionBackend, AttentionMetadata, ScoreBias
from triptych.model.cache.kv_cache import LayerCache, StateCache, StateTables
from triptych.model.config.attention import AttentionConfig, GatedDeltaConfig
from triptych.model.config.cache import PagedSpec

# -- Different backends for the layers of one model.


class PerLayerBackend:
    """A backend that computes each layer's attention by the backend that was chosen for it
    (`triptych.model.attention.selection`).
    """

    def __init__(self, chosen: Mapping[AttentionConfig, AttentionBackend]) -> None:
        backends = chosen.values()
        self.name = ", ".join(dict.fromkeys(backend.name for backend in backends))
        self.graph_safe = all(backend.graph_safe for backend in backends)
        self.gathers_pages = any(backend.gathers_pages for backend in backends)
        self._chosen = dict(chosen)

    @property
    def distinct(self) -> tuple[AttentionBackend, ...]:
        """The chosen backends, each once."""
        return tuple(dict.fromkeys(self._chosen.values()))

    def of(self, layer: AttentionConfig) -> AttentionBackend:
        """Return the backend of a layer."""
        return self._chosen[layer]

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
        if layer not in self._chosen:
            return "no backend was chosen for it"
        return self.of(layer).unsupported(layer, dtype, cache)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.of(config).forward(query, key, value, cache, metadata, config, bias, sinks)


def backend_of(backend: AttentionBackend, layer: AttentionConfig) -> AttentionBackend:
    """Return the backend that computes `layer` in a model with `backend`."""
    return backend.of(layer) if isinstance(backend, PerLayerBackend) else backend


# -- Recurrent layers: a backend may compute everything between their projections at once.


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrent layer's parameters, without its projections."""

    config: GatedDeltaConfig
    convolution: Tensor  # [channels, kernel]
    decay: Tensor  # [value heads]; so is `dt_bias`
    dt_bias: Tensor
    gain: Tensor  # [value_dim] of the norm of outputs


@runtime_checkable
class RecurrentBackend(AttentionBackend, Protocol):
    """A backend that also computes recurrent layers; its steps never wait for the device."""

    chunk: int  # tokens of a prompt that are computed together

    @abstractmethod
    def unsupported_recurrence(self, config: GatedDeltaConfig, dtype: torch.dtype) -> str | None:
        """Return why it cannot compute a layer over rows of this dtype; None if it can."""

    @abstractmethod
    def recur(
        self, layer: Recurrence, inputs: Tensor, gates: Tensor, tables: StateTables, states: StateCache | None
    ) -> Tensor:
        """Return the rows `[T, value_size]` of the layer's last projection.

        `inputs` `[T, channels + value_size]` are queries, keys, values and the outputs' gate, `gates` `[T, 2 H]` rates
        and decays, as projected; `tables` name every row once, in chunks of at most `chunk` tokens.
        """


def recurrent_backend(
    backend: AttentionBackend, config: GatedDeltaConfig, dtype: torch.dtype
) -> RecurrentBackend | None:
    """Return the backend that computes a recurrent layer in a model with `backend`; None: torch computes it."""
    for one in backend.distinct if isinstance(backend, PerLayerBackend) else (backend,):
        if isinstance(one, RecurrentBackend) and one.unsupported_recurrence(config, dtype) is None:
            return one
    return None
