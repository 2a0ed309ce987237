"""Vectors of texts and images in one space, made of the hidden states of each one's stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.model.config.model import JointConfig, ModelConfig, ProbeConfig
from triptych.model.linear.base import Linear, LinearSpec, Part
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.feed_forward import activated, projections
from triptych.model.network.norms import build_norm


class JointSpace(nn.Module):
    """One input's hidden states `[L, d]` to its vector `[D]`, each input alone: its bits depend on no other."""

    def __init__(self, config: ModelConfig, joint: JointConfig, linear: LinearFactory) -> None:
        super().__init__()
        assert config.vision is not None
        self.config = joint
        part, width = (Part(joint.size),), config.text_stack.output_width
        self.text = linear(LinearSpec("text", width, part, joint.text_bias))
        size = config.vision.hidden_size
        self.image: Linear | None = None
        if joint.projects_images:
            self.image = linear(LinearSpec("image", size, part, bias=False))
        self.probe = Probe(joint.probe, size, linear.within("probe")) if joint.probe is not None else None
        self.scale = nn.Parameter(torch.empty(1))
        self.bias = None if joint.exclusive else nn.Parameter(torch.empty(1))

    def of_text(self, hidden: Tensor, ids: tuple[int, ...]) -> Tensor:
        """Return the vector of the text with these token ids."""
        row: Tensor = self.text(hidden[self._end(ids)][None])[0]
        return row

    def of_image(self, hidden: Tensor) -> Tensor:
        """Return the vector of an image."""
        row: Tensor = hidden[:1] if self.probe is None else self.probe(hidden)
        return (row if self.image is None else self.image(row))[0]

    def _end(self, ids: tuple[int, ...]) -> int:
        """Return the position of a text whose hidden state counts."""
        end = self.config.end_id
        return ids.index(end) if end in ids else len(ids) - 1

    @property
    def similarity(self) -> tuple[float, float]:
        """The factor of cosines, and what is added."""
        return self.scale.float().exp().item(), 0.0 if self.bias is None else self.bias.float().item()


class Probe(nn.Module):
    """`[L, d] -> [1, d]`: attention of one learned query, then `x + mlp(norm(x))`."""

    def __init__(self, config: ProbeConfig, size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Parameter(torch.empty(size))
        self.q = linear(LinearSpec("q", size, (Part(size),)))
        self.kv = linear(LinearSpec("kv", size, (Part(size), Part(size))))
        self.out = linear(LinearSpec("out", size, (Part(size),)))
        self.norm = build_norm(config.norm, size)
        up, down = projections(config.mlp, size)
        self.up, self.down = linear(up), linear(down)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.config.attention.num_heads
        query = self.q(self.query[None]).view(heads, 1, -1)  # [H, 1, D]
        keys, values = self.kv(hidden).unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)  # [H, L, D] each
        scores = (query * self.config.attention.scale) @ keys.transpose(1, 2)
        seen = scores.float().softmax(dim=-1).to(values.dtype) @ values  # [H, 1, D]
        x: Tensor = self.out(seen.view(1, -1))
        return x + self.down(activated(self.config.mlp, self.up(self.norm(x))))
