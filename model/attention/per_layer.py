"""Different backends for the layers of one model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.attention.base import AttentionBackend, AttentionMetadata, ScoreBias
from model.cache.kv_cache import LayerCache
from model.config.cache import PagedSpec
from model.config.layer import AttentionConfig


class PerLayerBackend:
    """Computes the attention of each layer by the backend that was chosen for it (`model.attention.selection`)."""

    def __init__(self, chosen: Mapping[AttentionConfig, AttentionBackend]) -> None:
        backends = chosen.values()
        self.name = ", ".join(dict.fromkeys(backend.name for backend in backends))
        self.graph_safe = all(backend.graph_safe for backend in backends)
        self.gathers_pages = any(backend.gathers_pages for backend in backends)
        self._chosen = dict(chosen)

    @property
    def distinct(self) -> tuple[AttentionBackend, ...]:
        """The backends that were chosen for some layer."""
        return tuple(dict.fromkeys(self._chosen.values()))

    def of(self, layer: AttentionConfig) -> AttentionBackend:
        """The backend of a layer."""
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
    """What computes the attention of `layer` in a model that has `backend`."""
    return backend.of(layer) if isinstance(backend, PerLayerBackend) else backend
