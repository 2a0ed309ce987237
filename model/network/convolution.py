"""A convolution over the tokens of each sequence, beside the first layer of a stack (DeBERTa-v2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.base import AttentionMetadata
from model.config.model import ConvolutionConfig
from model.linear.base import LinearSpec, Part
from model.linear.factory import LinearFactory
from model.network.mlp import ACTIVATIONS
from model.system.transfer import to_device


class Convolution(nn.Module):
    """`norm(y + act(W [x_{t - r}; ...; x_{t + r}] + b))` of packed rows; rows of other sequences read as zeros."""

    def __init__(self, config: ConvolutionConfig, size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        self.project = linear(LinearSpec("project", size * config.width, (Part(size),)))
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(size, eps=config.eps)

    def forward(self, x: Tensor, y: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`[T, d]` of what a layer reads `[T, d]` and what it gives `[T, d]`."""
        seen = self._neighbours(x, metadata).transpose(1, 2).flatten(1)  # [T, d * width], as Conv1d stores its weight
        summed = y + self.activation(self.project(seen))
        weight, bias = self.norm.weight.to(summed.dtype), self.norm.bias.to(summed.dtype)  # rows of C are float32
        return functional.layer_norm(summed, weight.shape, weight, bias, self.norm.eps)

    def _neighbours(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`[T, width, d]` of each row, the rows before it and the rows behind it."""
        lens = torch.tensor(metadata.q_lens)
        starts = torch.tensor(metadata.cu_seqlens_q)
        bounds = torch.stack((starts[:-1], starts[1:] - 1)).repeat_interleave(lens, dim=1)  # [2, T], made on the host
        first, last = to_device(bounds, x.device)[..., None]
        rows, reach = torch.arange(len(x), device=x.device)[:, None], self.config.width // 2
        seen = rows + torch.arange(-reach, reach + 1, device=x.device)  # [T, width]
        outside = (seen < first) | (seen > last)
        return x[seen.clamp(0, len(x) - 1)].masked_fill(outside[..., None], 0.0)
