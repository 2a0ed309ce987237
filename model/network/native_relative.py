"""Relative positions of a stack's layers as C reads them: packed keys and queries, one row a head and distance.

They depend on the weights alone, so they are made once for segments up to some length, and again, twice as long or
more, when a longer segment comes.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from model.config.layer import AttentionConfig, DisentangledConfig
from model.config.model import StackConfig
from model.linear.native import NativeLinear, packed_bytes, packed_linear
from model.native.library import KINDS, Kind, Library
from model.native.structures import RelativePositions
from model.network.disentangled import DisentangledBias

if TYPE_CHECKING:
    from model.network.layer import Layer
    from model.network.stack import Stack

_LEAST = 64  # keys of a segment; C wants a multiple of 32


class NativePositions:
    """The relative positions of the layers that have them, in the order of `of_layer`'s calls."""

    def __init__(self, stack: Stack, library: Library, dtype: torch.dtype) -> None:
        """`dtype` is what the stack's attention multiplies."""
        self._stack, self._library, self._dtype = stack, library, dtype
        self._layers: list[Layer] = []
        self._packed: list[NativeLinear] = []  # what the structures point into
        self._reach = 0
        self._structures: ctypes.Array[RelativePositions] | None = None

    def of_layer(self, layer: Layer) -> int:
        """The place that this layer's relative positions will have among all."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def __bool__(self) -> bool:
        return bool(self._layers)

    def structures(self, longest: int) -> ctypes.Array[RelativePositions]:
        """Of each layer, for segments of up to `longest` keys."""
        if self._structures is None or self._reach < longest:
            self._reach, self._structures, self._packed = _reach_of(longest), None, []
            structures = (RelativePositions * len(self._layers))()
            for place, layer in enumerate(self._layers):
                structures[place].reach = self._reach
                self._pack(layer, structures[place])
            self._structures = structures
        return self._structures

    def _pack(self, layer: Layer, into: RelativePositions) -> None:
        assert isinstance(layer.relative, DisentangledBias) and self._stack.relative is not None
        vectors = layer.relative.vectors(self._stack.relative(), layer.attn.qkv)
        for side, rows in zip(("keys", "queries"), vectors.by_reach(self._reach), strict=True):
            if rows is not None:
                by_head = rows.transpose(0, 1).flatten(0, 1)  # [H * 2 reach, D]
                packed = packed_linear(self._library, by_head, kind=_kind(layer.config.attention, self._dtype))
                setattr(into, side, packed.matrix)
                self._packed.append(packed)


def relative_bytes(config: StackConfig, dtype: torch.dtype, longest: int) -> int:
    """What the relative positions of a stack take for segments of up to `longest` keys."""
    total = 0
    for layer in config.distinct_layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig) and isinstance(position := mixer.position, DisentangledConfig):
            sides = position.content_to_position + position.position_to_content
            rows = mixer.num_heads * 2 * _reach_of(longest)
            total += sides * packed_bytes(_kind(mixer, dtype), rows, mixer.head_dim)
    return total


def _reach_of(longest: int) -> int:
    return max(_LEAST, 1 << (longest - 1).bit_length())


def _kind(config: AttentionConfig, dtype: torch.dtype) -> Kind:
    """Of the products of an encoder's attention: pairs of bfloat16 want an even number of them."""
    return Kind.F32 if config.head_dim % 2 else KINDS[dtype]
