"""The one pool of keys and values: pages of `block_size` tokens for every layer, self and cross alike.

    keys, values: [num_layers, num_blocks, block_size, K, D]      slot = block * block_size + offset

Who owns which block is `model.engine.block_manager`'s business; here are only the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import StackConfig


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages `[num_blocks, block_size, K, D]`."""

    keys: Tensor
    values: Tensor

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put `key` and `value` `[T, K, D]` at `slots` `[T]`."""
        self.keys.view(-1, *self.keys.shape[2:]).index_copy_(0, slots, key)
        self.values.view(-1, *self.values.shape[2:]).index_copy_(0, slots, value)

    def read(self, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, length, K, D]` of the sequences whose blocks are `block_tables` `[B, M]`."""
        block_size = self.keys.shape[1]
        blocks = block_tables[:, : -(-length // block_size)]
        shape = (blocks.shape[0], blocks.shape[1] * block_size, *self.keys.shape[2:])
        return self.keys[blocks].view(shape)[:, :length], self.values[blocks].view(shape)[:, :length]


class KVCache:
    """The pool of one model."""

    def __init__(
        self, stack: StackConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        attention = stack.attention
        shape = (stack.num_layers, num_blocks, block_size, attention.num_kv_heads, attention.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.layers = tuple(LayerCache(self.keys[i], self.values[i]) for i in range(stack.num_layers))

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Fill whole blocks (to -> from), all read before any is written."""
        target, source = torch.tensor(list(copies.items()), device=self.device).T
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]
