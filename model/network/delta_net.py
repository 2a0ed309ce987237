"""Gated DeltaNet: a recurrent layer in the place of attention (Yang et al. 2025), as Qwen3-Next has it.

Between its projections a backend may compute it (`triptych.model.attention.layer_backends`), else torch does: prompts
in chunks, whose tokens are solved for together (section 3.3 there: the UT transform of Yang et al. 2024), single tokens
by the recurrence itself. Both are in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.layer_backends import Recurrence, RecurrentBackend, recurrent_backend
from triptych.model.cache.kv_cache import StateCache, StateSpan, independent_spans, whole_segments
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.linear.base import LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.inputs import StepContext

CHUNK = 64
_LENGTH_EPS = 1e-6  # of queries' and keys' squared lengths


class GatedDeltaNet(nn.Module):
    """The token mixer of a recurrent layer: `input` gives queries, keys, values and the outputs' gate, `gates` the rate
    b and the decay's a of each value head."""

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        keys, values = Part(config.num_key_heads, config.key_dim), Part(config.num_value_heads, config.value_dim)
        heads = Part(config.num_value_heads)
        parts = (keys, keys, values, values)
        self.input = linear(LinearSpec("input", hidden_size, parts, bias=False, split=Split.OUTPUTS))
        self.gates = linear(
            LinearSpec("gates", hidden_size, (heads, heads), bias=False, split=Split.OUTPUTS, exact=True)
        )
        out = LinearSpec("out", values.outputs, (Part(hidden_size),), bias=False, split=Split.INPUTS)
        self.out = linear(out)
        self.convolution = nn.Parameter(torch.empty(config.channels, config.kernel))
        self.decay = nn.Parameter(torch.empty(config.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.num_value_heads))
        self.norm = nn.RMSNorm(config.value_dim, eps=config.eps)
        self._chosen: tuple[AttentionBackend, torch.dtype, RecurrentBackend | None] | None = None

    def forward(self, x: Tensor, step: StepContext, states: StateCache | None) -> Tensor:  # [T, d] -> [T, d]
        inputs, gates = step.project(self.input, x), step.project(self.gates, x)
        layer = Recurrence(self.config, self.convolution, self.decay, self.dt_bias, self.norm.weight)
        backend = self._backend(step.backend, x.dtype)
        if backend is not None:
            tables = step.state_tables(backend.chunk, kept=states is not None)
            outputs = backend.recur(layer, inputs, gates, tables, states)
        else:
            spans = step.inputs.states if states is not None else whole_segments(step.inputs.metadata.q_lens)
            outputs = recur(layer, inputs, gates, spans, states)
        return step.project(self.out, outputs.to(x.dtype))

    def _backend(self, backend: AttentionBackend, dtype: torch.dtype) -> RecurrentBackend | None:
        """Return what computes the layer, chosen once: looking at a backend takes longer than a launch."""
        if self._chosen is None or self._chosen[0] is not backend or self._chosen[1] is not dtype:
            self._chosen = backend, dtype, recurrent_backend(backend, self.config, dtype)
        return self._chosen[2]


def recur(
    layer: Recurrence, inputs: Tensor, gates: Tensor, spans: Iterable[StateSpan], states: StateCache | None
) -> Tensor:
    """Compute `RecurrentBackend.recur` of spans by torch, in float32."""
    config = layer.config
    mixed, gate = inputs.float().split((config.channels, config.value_size), dim=-1)
    rate, decay = gates.float().chunk(2, dim=-1)  # [T, H]
    decay = -layer.decay.float().exp() * functional.softplus(decay + layer.dt_bias.float())
    rows = torch.cat((mixed, rate.sigmoid(), decay), dim=-1)
    outputs = mixed.new_empty(len(inputs), config.num_value_heads, config.value_dim)
    for together in independent_spans(spans):
        single = [span for span in together if span.last - span.first == 1]
        for group in ([single] if single else []) + [[span] for span in together if span.last - span.first > 1]:
            _compute(layer, group, rows, outputs, states)
    outputs = functional.rms_norm(outputs, layer.gain.shape, layer.gain.float(), config.eps)
    return outputs.flatten(1) * functional.silu(gate)


def _compute(
    layer: Recurrence, spans: list[StateSpan], rows: Tensor, outputs: Tensor, states: StateCache | None
) -> None:
    """Fill the outputs of spans of equal length, and keep their states."""
    config, sources = layer.config, [span.source for span in spans]
    first = torch.tensor([span.first for span in spans])
    at = (first[:, None] + torch.arange(spans[0].last - spans[0].first)).to(rows.device)  # [B, L]
    mixed, rate, decay = rows[at].split((config.channels, *(config.num_value_heads,) * 2), dim=-1)
    if states is not None:
        recurrent, before = states.read(sources)
    else:
        recurrent, before = (rows.new_zeros(len(spans), *shape) for shape in config.state_shapes)
    mixed = torch.cat((before, mixed), dim=1)  # [B, kernel - 1 + L, C]
    after = mixed[:, mixed.shape[1] - config.kernel + 1 :]
    query, key, value = _convolved(layer, mixed)
    outputs[at], recurrent = delta_rule(query, key, value, decay, rate, recurrent)
    if states is not None:
        states.write([span.target for span in spans], recurrent, after)


def _convolved(layer: Recurrence, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[B, L, H, K]`, of length 1, and values `[B, L, H, V]` of channels `[B, L + k - 1, C]`."""
    config, length = layer.config, mixed.shape[1] - layer.config.kernel + 1
    weight = layer.convolution.float()
    summed = torch.zeros_like(mixed[:, :length])
    for tap in range(config.kernel):
        summed = summed + mixed[:, tap : tap + length] * weight[:, tap]
    q, k, v = functional.silu(summed).split((config.key_size, config.key_size, config.value_size), dim=-1)
    q, k = (_unit(one.unflatten(-1, (config.num_key_heads, config.key_dim))) for one in (q, k))
    shared = config.num_value_heads // config.num_key_heads
    q, k = (one.repeat_interleave(shared, dim=2) for one in (q * config.key_dim**-0.5, k))
    return q, k, v.unflatten(-1, (config.num_value_heads, config.value_dim))


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _LENGTH_EPS)


def delta_rule(
    query: Tensor,  # [B, L, H, K] float32, as the following
    key: Tensor,  # [B, L, H, K]
    value: Tensor,  # [B, L, H, V]
    decay: Tensor,  # [B, L, H] logarithms, at most 0
    rate: Tensor,  # [B, L, H]
    state: Tensor,  # [B, H, K, V]
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, L, H, V]` of the gated delta rule (`GatedDeltaConfig`), and the state after them."""
    if query.shape[1] == 1:
        return _one_token(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], rate[:, 0], state)
    outputs = []
    for begin in range(0, query.shape[1], CHUNK):
        chunk = slice(begin, begin + CHUNK)
        q, k, v, g, b = (one[:, chunk].transpose(1, 2) for one in (query, key, value, decay, rate))
        output, state = _chunk(q, k, v, g, b, state)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), state


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule itself, of one token of each sequence: `[B, H, ...]`."""
    state = state * decay.exp()[..., None, None]
    change = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * rate[..., None]
    state = state + key[..., None] * change[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", query, state)[:, None], state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over up to 64 tokens `[B, H, C, ...]` at once.

    With G_t the product of decays up to t, the changes d_t of the state solve the unit triangular system
    `d_t + b_t sum_(s < t) (G_t / G_s) (k_t . k_s) d_s = b_t (v_t - G_t S_0^T k_t)`.
    """
    total = decay.double().cumsum(dim=-1)  # logarithms of G, whose differences would lose digits in float32
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril().float()  # [B, H, C, C]
    left = (total[..., -1:] - total).exp().float()[..., None]
    total = total.float()
    system = (key @ key.transpose(-1, -2)) * between * rate[..., None]
    wanted = (value - (key * total.exp()[..., None]) @ state) * rate[..., None]
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [B, H, C, V]
    outputs = (query * total.exp()[..., None]) @ state + ((query @ key.transpose(-1, -2)) * between) @ change
    state = state * total[..., -1].exp()[..., None, None] + (key * left).transpose(-1, -2) @ change
    return outputs, state
