"""The modules before the first layer: tokens, positions, image patches and frames of sound to vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.attention.base import AttentionMetadata
from triptych.model.config.layer import LayerEmbeddingConfig
from triptych.model.config.model import AudioConfig, EmbeddingConfig, ImageConfig, MaskDropout
from triptych.model.config.sharding import Range
from triptych.model.config.stack import ConvolutionConfig, PositionConfig
from triptych.model.linear.base import Linear, LinearSpec, Part
from triptych.model.linear.factory import Collective, LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.inputs import StackInput
from triptych.model.network.norms import build_norm
from triptych.model.network.positions import inverse_frequencies
from triptych.model.system.devices import to_device


class LearnedPositions(nn.Module):
    """A trained table; row `position + offset` (BART reserves 2 rows, RoBERTa pad + 1)."""

    def __init__(self, config: PositionConfig, size: int) -> None:
        super().__init__()
        self.offset = config.offset
        self.weight = nn.Parameter(torch.empty(config.max_positions + config.offset, size))

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight[positions + self.offset]  # [T, E]


class SinusoidalPositions(nn.Module):
    """`[sin(t w_k) | cos(t w_k)]` with `w_k = 10000^(-2k / d)`, computed, never stored (Vaswani et al. 2017, 3.5)."""

    def __init__(self, config: PositionConfig, size: int) -> None:
        super().__init__()
        self.offset = config.offset
        self.interleaved = config.interleaved
        # The inclusive variant spreads as many frequencies from 1 to exactly 1 / 10000.
        half = size // 2
        self.base = 10_000.0 ** (half / (half - 1)) if config.inclusive else 10_000.0
        self.pads = config.padding is not None  # a position of -1 is none
        self.size = size

    def forward(self, positions: Tensor) -> Tensor:
        frequencies = inverse_frequencies(self.base, self.size, positions.device)
        angles = (positions + self.offset)[:, None] * frequencies  # [T, E / 2]
        pair = (angles.sin(), angles.cos())
        found = (torch.stack(pair, dim=-1).flatten(1) if self.interleaved else torch.cat(pair, dim=-1)).float()
        return found.masked_fill((positions < 0)[:, None], 0.0) if self.pads else found


class TokenTable(nn.Embedding):
    """Token vectors, which may be kept in a narrower dtype than the network computes in."""

    def __init__(self, rows: int, size: int) -> None:
        # Not drawn at random: for that, on the meta device, torch would load its compiler, a second or two.
        super().__init__(rows, size, _weight=torch.empty(rows, size))
        self.vector_dtype: torch.dtype | None = None  # None: the table's own

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, E]
        vectors = super().forward(ids)
        return vectors if self.vector_dtype is None else vectors.to(self.vector_dtype)


class VocabularyTable(TokenTable):
    """This rank's rows `[first, last)` of a token table; the sum over ranks is the whole table's vector."""

    def __init__(self, rows: Range, size: int, collective: Collective) -> None:
        super().__init__(rows[1] - rows[0], size)
        self.first = rows[0]
        self.collective = collective

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, E]
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= self.num_embeddings)
        vectors = super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0.0)
        return self.collective.sum(vectors)


class PackedTable(nn.Module):
    """Token vectors from the packed matrix of a head that has the same rows, so that they are kept once."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self._head = (head,)  # not a module of this one

    def forward(self, ids: Tensor) -> Tensor:  # [T] -> [T, E]
        return self._head[0].rows(ids)


def token_table(rows: int, size: int, collective: Collective | None) -> TokenTable:
    """Make a token table, or this rank's part of it."""
    if collective is None:
        return TokenTable(rows, size)
    return VocabularyTable(collective.shard.shard_range(rows), size, collective)


def without_masked(vectors: Tensor, inputs: StackInput, dropout: MaskDropout) -> Tensor:
    """Token vectors `[T, E]` with zeros for masked tokens, and the others of a segment multiplied in return."""
    starts = inputs.metadata.on_device().cu_seqlens_q  # read on the device, so that a recorded batch may do this
    rows, lengths = torch.arange(len(vectors), dtype=starts.dtype, device=vectors.device), starts.diff()
    segment = torch.bucketize(rows, starts[1:], right=True)  # [T]
    masked = inputs.input_ids == dropout.mask_token_id
    counts = torch.zeros(len(lengths), device=vectors.device).index_add_(0, segment, masked.float())
    factors = (1 - dropout.share) / (1 - counts / lengths)  # of each segment
    return (vectors * factors[segment, None].to(vectors.dtype)).masked_fill(masked[:, None], 0.0)


class PatchEmbedding(nn.Module):
    """Images to token vectors: one matrix over the flattened patches, after learned tokens.

    Positions that are stretched are its own; others are the stack's.
    """

    def __init__(self, config: ImageConfig, size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Parameter(torch.empty(size)) if config.class_token else None
        self.distillation = nn.Parameter(torch.empty(size)) if config.distilled else None
        self.registers = nn.Parameter(torch.empty(config.registers, size)) if config.registers else None
        self.positions: nn.Parameter | None = None
        if config.grid is not None:
            self.positions = nn.Parameter(torch.empty(config.class_token + config.grid**2, size))
        self.project = linear(LinearSpec("project", config.patch_elements, (Part(size),), config.bias))

    def forward(self, pixels: Tensor | Sequence[Tensor]) -> Tensor:  # [B, C, S, S] -> [B * tokens, E]
        """`pixels` of images of any proportions are `[C, H, W]` of each."""
        if self.config.most_patches is not None:
            return torch.cat([self._of_any_shape(one) for one in pixels])
        assert isinstance(pixels, Tensor)
        patch = self.config.patch
        patches = nn.functional.unfold(pixels, patch, stride=patch).transpose(1, 2)  # [B, N, C * P * P]
        projected = self.project(patches.flatten(0, 1)).unflatten(0, patches.shape[:2])
        if self.first is None:
            return projected.flatten(0, 1)
        first = self.first[None]
        if self.positions is not None:
            positions = self._stretched(self.positions)
            first, projected = first + positions[:1], projected + positions[1:]
        more = [one for one in (self.distillation, self.registers) if one is not None]
        before = torch.cat((first, *(one.view(-1, first.shape[1]) for one in more)))
        return torch.cat((before.expand(len(pixels), -1, -1), projected), dim=1).flatten(0, 1)

    def _of_any_shape(self, pixels: Tensor) -> Tensor:  # [C, H, W] -> [H / P * W / P, E]
        """Return the vectors of one image, each of a patch with all channels of a pixel together."""
        grid, patch, positions = self.config.grid, self.config.patch, self.positions
        assert grid is not None and positions is not None
        channels, rows, columns = len(pixels), pixels.shape[1] // patch, pixels.shape[2] // patch
        cut = pixels.reshape(channels, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        # Contiguous: torch 2.13 stretches channels that lie last to one column by other weights.
        table = positions.float().view(1, grid, grid, -1).permute(0, 3, 1, 2).contiguous()
        table = nn.functional.interpolate(
            table, size=(rows, columns), mode="bilinear", align_corners=False, antialias=self.config.antialias
        )
        return self.project(cut.reshape(rows * columns, -1)) + table[0].flatten(1).T.to(positions.dtype)

    def _stretched(self, positions: Tensor) -> Tensor:  # [1 + grid^2, E] -> [1 + side^2, E]
        """Positions of the first token, and of patches at the size of images; interpolated in float32."""
        config = self.config
        assert config.grid is not None
        if config.grid == config.side:
            return positions
        table = positions[1:].float().view(1, config.grid, config.grid, -1).permute(0, 3, 1, 2)
        size = (config.side, config.side)
        table = nn.functional.interpolate(
            table, size=size, mode="bicubic", align_corners=False, antialias=config.antialias
        )
        return torch.cat((positions[:1], table.to(positions.dtype).permute(0, 2, 3, 1).flatten(0, 2)))


class AudioEmbedding(nn.Module):
    """Log-mel frames to vectors: two convolutions of width 3, each followed by a GELU; the second has stride 2.

    Each is one product with the matrix `[d, channels * 3]`, as Conv1d stores it, over what its outputs see.
    """

    def __init__(self, config: AudioConfig, size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.conv1 = linear(LinearSpec("conv1", 3 * config.num_mel_bins, (Part(size),)))
        self.conv2 = linear(LinearSpec("conv2", 3 * size, (Part(size),)))

    def forward(self, frames: Tensor) -> Tensor:  # [B, mel bins, frames] -> [B * frames / 2, E]
        x = _convolved(frames, 1, self.conv1).transpose(1, 2)  # [B, E, frames]
        return _convolved(x, 2, self.conv2).flatten(0, 1)


def _convolved(x: Tensor, stride: int, matrix: Linear) -> Tensor:
    """`[B, T / stride, E]` of `[B, C, T]`, with zeros beyond both ends."""
    seen = nn.functional.pad(x, (1, 1)).unfold(2, 3, stride)  # [B, C, T / stride, 3]
    rows = seen.permute(0, 2, 1, 3).flatten(2)  # [B, T / stride, C * 3]
    return nn.functional.gelu(matrix(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])


# -- A convolution over the tokens of each sequence, parallel to the first layer of a stack (DeBERTa-v2).


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
        """Return each row with the rows before and after it, `[T, width, d]`."""
        lens = torch.tensor(metadata.q_lens)
        starts = torch.tensor(metadata.cu_seqlens_q)
        bounds = torch.stack((starts[:-1], starts[1:] - 1)).repeat_interleave(lens, dim=1)  # [2, T], made on the host
        first, last = to_device(bounds, x.device)[..., None]
        rows, reach = torch.arange(len(x), device=x.device)[:, None], self.config.width // 2
        seen = rows + torch.arange(-reach, reach + 1, device=x.device)  # [T, width]
        outside = (seen < first) | (seen > last)
        return x[seen.clamp(0, len(x) - 1)].masked_fill(outside[..., None], 0.0)


class LayerEmbeddings(nn.Module):
    """`(table(id) sqrt(P) + norm(W x / sqrt(d))) / sqrt(2)` of each token, P numbers for each layer."""

    def __init__(
        self, config: LayerEmbeddingConfig, embedding: EmbeddingConfig, layers: int, linear: LinearFactory
    ) -> None:
        super().__init__()
        self.shape = (layers, config.size)
        width, size = layers * config.size, embedding.embedding_size
        self.tokens = token_table(embedding.vocab_size, width, linear.collective)
        self.project = linear(LinearSpec("project", size, (Part(width),), bias=False))
        self.norm = build_norm(config.norm, config.size)

    def forward(self, ids: Tensor, tokens: Tensor) -> Tensor:  # [T], [T, d] embedded -> [T, layers, P]
        size = tokens.shape[-1]
        projected = self.norm((self.project(tokens) * size**-0.5).unflatten(-1, self.shape))
        vectors = self.tokens(ids).to(projected.dtype).unflatten(-1, self.shape)
        return (projected + vectors * self.shape[1] ** 0.5) * 2**-0.5


class VectorGate(nn.Module):
    """`norm(project(act(gate(x)) * v))` of rows x and their vectors v for the layer."""

    def __init__(self, config: LayerEmbeddingConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = linear(LinearSpec("gate", hidden_size, (Part(config.size),), bias=False))
        self.project = linear(LinearSpec("project", config.size, (Part(hidden_size),), bias=False))
        self.norm = build_norm(config.norm, hidden_size)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:  # [T, d], [T, P] -> [T, d]
        return self.norm(self.project(self.activation(self.gate(x)) * vectors))
