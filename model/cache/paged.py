"""The one pool of keys and values: pages of `block_size` tokens for every layer, self and cross alike.

    keys, values: [num_layers, num_blocks, block_size, K, D]      slot = block * block_size + offset

Who owns which block is `model.engine.scheduling.block_manager`'s business; here are only the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config.model import StackConfig
from model.errors import ConfigError
from model.system import huge_pages
from model.system.transfer import device_tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages `[num_blocks, block_size, K, D]`; of int8 with a scale for each token and head."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None  # of keys and values, [num_blocks, block_size, K] float32

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put `key` and `value` `[T, K, D]` at `slots` `[T]`."""
        for pages, rows, scales in zip(
            (self.keys, self.values), (key, value), self.scales or (None, None), strict=True
        ):
            if scales is not None:
                most = rows.float().abs().amax(dim=-1)  # [T, K]
                levels = torch.full_like(most, 127)  # a number's reciprocal would be multiplied with, on a GPU
                scales.view(-1, scales.shape[-1]).index_copy_(0, slots, most / levels)
                rows = (rows.float() * (levels / most.clamp(min=1e-30))[..., None]).round()
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, rows.to(pages.dtype))

    def read(self, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, length, K, D]` of the sequences whose blocks are `block_tables` `[B, M]`."""
        block_size = self.keys.shape[1]
        blocks = block_tables[:, : -(-length // block_size)]
        shape = (blocks.shape[0], blocks.shape[1] * block_size, *self.keys.shape[2:])
        keys, values = self.keys[blocks], self.values[blocks]
        if self.scales is not None:
            keys, values = (x * s[blocks][..., None] for x, s in zip((keys, values), self.scales, strict=True))
        return keys.view(shape)[:, :length], values.view(shape)[:, :length]


class KVCache:
    """The pool of one model."""

    def __init__(
        self, stack: StackConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        attention = stack.layers[0].mixer
        if any(layer.mixer.kv_shape != attention.kv_shape for layer in stack.layers):
            raise ConfigError("the KV cache needs layers with equal key and value heads")
        shape = (stack.num_layers, num_blocks, block_size, attention.num_kv_heads, attention.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._tensors = [self.keys, self.values]
        scales: Sequence[tuple[Tensor, Tensor] | None] = [None] * stack.num_layers
        if dtype is torch.int8:
            key_scales, value_scales = (_zeros(shape[:-1], torch.float32, device) for _ in range(2))
            self._tensors += [key_scales, value_scales]
            scales = list(zip(key_scales, value_scales, strict=True))
        self.layers = tuple(
            LayerCache(keys, values, pair) for keys, values, pair in zip(self.keys, self.values, scales, strict=True)
        )

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Fill whole blocks (to -> from), all read before any is written."""
        target, source = (device_tensor(list(of), self.device, torch.int64) for of in (copies, copies.values()))
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # blocks are taken from all over the pool, the longest unused first
        return huge_pages.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
