"""Recurrent layers as a backend may compute them: all between their projections at once."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.attention.per_layer import PerLayerBackend
from model.cache.kv_cache import StateCache, StateTables
from model.config.layer import GatedDeltaConfig


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrent layer's parameters, but for its projections."""

    config: GatedDeltaConfig
    convolution: Tensor  # [channels, kernel]
    decay: Tensor  # [value heads], as of the following
    dt_bias: Tensor
    gain: Tensor  # [value_dim] of the norm of outputs


@runtime_checkable
class RecurrentBackend(AttentionBackend, Protocol):
    """A backend that computes recurrent layers too; nothing of its steps waits for the device."""

    chunk: int  # tokens of a prompt that are computed together

    @abstractmethod
    def unsupported_recurrence(self, config: GatedDeltaConfig, dtype: torch.dtype) -> str | None:
        """Why it cannot compute a layer over rows of this dtype; None: it can."""

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
    """What computes a recurrent layer in a model that has `backend`; None: torch does."""
    for one in backend.distinct if isinstance(backend, PerLayerBackend) else (backend,):
        if isinstance(one, RecurrentBackend) and one.unsupported_recurrence(config, dtype) is None:
            return one
    return None
