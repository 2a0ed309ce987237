"""The feed-forward of a layer: one MLP with its activation, or a router and experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.config.layer import ChoiceConfig, ExpertsConfig, MLPConfig, Norms
from triptych.model.linear.base import LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.bounds import bounds_of, project
from triptych.model.network.fused_ops import clamped, gated, weighted_sums
from triptych.model.network.inputs import StepContext
from triptych.model.network.norms import SublayerNorms, build_norm


class MLP(nn.Module):
    """`down(act(up(x)))`; gated: `down(act(gate(x)) * up(x))` with gate and up in one matrix."""

    def __init__(self, config: MLPConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        up, down = projections(config, hidden_size)
        self.up, self.down = linear(up), linear(down)
        self.up_bounds, self.down_bounds = (bounds_of(one, bounded=config.bounded) for one in (self.up, self.down))
        self.xielu = nn.Parameter(torch.empty(4)) if config.xielu else None

    def forward(self, x: Tensor, step: StepContext) -> Tensor:  # [T, d] -> [T, d]
        inner = project(self.up, self.up_bounds, x, step)
        inner = activated(self.config, inner) if self.xielu is None else xielu(inner, self.xielu)
        return project(self.down, self.down_bounds, inner, step)


def projections(config: MLPConfig, hidden_size: int, experts: int = 1) -> tuple[LinearSpec, LinearSpec]:
    """Return the specs of the up projection (with the gate) and of the down projection, for `experts` MLPs."""
    columns = (Part(config.intermediate_size // config.block, config.block),) * (2 if config.gated else 1)
    up = LinearSpec("up", hidden_size, columns, config.bias, Split.OUTPUTS, experts=experts)
    bias = config.bias if config.down_bias is None else config.down_bias
    size = (Part(hidden_size),)
    width, block = config.intermediate_size, config.block
    return up, LinearSpec("down", width, size, bias, Split.INPUTS, experts=experts, block=block)


def xielu(x: Tensor, learned: Tensor) -> Tensor:
    """xIELU of `[T, f]`: `a x^2 + b x` above 0, `c (e^min(x, eps) - 1 - x) + b x` below (Huang & Schlag 2024).

    `learned` are the logarithms of e^a - 1 and of e^(c - b) - 1, then b and eps.
    """
    first, second, linear, eps = learned.float().unbind()
    wide, above, below = x.float(), functional.softplus(first), linear + functional.softplus(second)
    bent = torch.where(wide > 0, above * wide * wide, (torch.expm1(torch.minimum(wide, eps)) - wide) * below)
    return (bent + linear * wide).to(x.dtype)


def activated(config: MLPConfig, hidden: Tensor) -> Tensor:
    """Return the activations `[T, f]` of the up projection's output `[T, f]`, or gated `[T, 2 f]`."""
    if config.clamp is not None:
        return clamped(hidden, config.clamp.limit, config.clamp.gain)
    return gated(hidden, config.activation) if config.gated else ACTIVATIONS[config.activation](hidden)


# -- A mixture of experts as the feed-forward of a layer (Shazeer et al. 2017, Fedus et al. 2021). Rows are put in the
# order of their experts, so that every expert multiplies its rows at once, and a token's results are added up in the
# order of its scores: neither depends on the other tokens of a step. Nothing here waits for the device, so a
# step with experts can be recorded as a CUDA graph. `Linear.of_experts` multiplies the rows.


@dataclass(frozen=True, slots=True)
class Routes:
    """Which of E experts compute which of T tokens, k experts for each."""

    weights: Tensor  # [T, k] float32, of each expert's output, in the order of the choice
    tokens: Tensor  # [T k] the token of each row; rows are sorted by expert
    places: Tensor  # [T, k] the rows of each token
    starts: Tensor  # [E + 1] int32, the first row of each expert; of a rank's own experts, if it has only some


def routes(config: ExpertsConfig, logits: Tensor, scales: Tensor | None = None, biases: Tensor | None = None) -> Routes:
    """Choose the experts of tokens by the logits `[T, E]` of their router.

    `scales` `[E]` are learned factors, `biases` `[E]` of a `ChoiceConfig`. On a rank with some of the experts their
    rows come first, and what others compute counts nothing.
    """
    logits = logits.float()
    if config.choice is not None:
        assert biases is not None
        experts, weights = _chosen(config, config.choice, logits, biases.float())
    elif config.mixer_tolerance is not None:
        experts, weights = _mixed(logits, config.per_token, 2 * config.mixer_tolerance)
    else:
        experts = _largest(logits, config.per_token)
        chosen = logits.gather(1, experts)
        weights = torch.softmax(chosen, dim=-1)
        if not config.renormalised:
            weights = torch.exp(chosen - logits.logsumexp(dim=-1, keepdim=True))
    if scales is not None:
        weights = weights * scales.float()[experts]
    first, end = config.held or (0, config.count)
    flat = experts.flatten()
    if config.held is not None:
        weights = weights.masked_fill((experts < first) | (experts >= end), 0.0)
        flat = (flat - first) % config.count
    order = torch.argsort(flat, stable=True)  # [T k]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = torch.arange(end - first + 1, device=order.device)
    starts = torch.searchsorted(flat[order], bounds).int()
    return Routes(weights, order // config.per_token, places.view_as(experts), starts)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of each row's largest values, `[T, count]`; of equal values the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _chosen(config: ExpertsConfig, choice: ChoiceConfig, logits: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of tokens by a `ChoiceConfig`, and their weights, `[T, k]` each."""
    scores = logits.sigmoid() if choice.sigmoid else logits.softmax(dim=-1)
    wanted = scores + biases
    if choice.groups > 1:
        groups = wanted.unflatten(-1, (choice.groups, -1))  # [T, groups, E / groups]
        best = _largest(groups.topk(2, dim=-1).values.sum(dim=-1), choice.groups_per_token)
        taken = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        wanted = groups.masked_fill(~taken[..., None], -torch.inf).flatten(1)
    experts = _largest(wanted, config.per_token)
    weights = scores.gather(1, experts)
    if config.renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=choice.least)
    return experts, weights * choice.factor


def _mixed(logits: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Return SparseMixer's experts of tokens in inference, and their weights, `[T, count]` each (Liu et al. 2024).

    Experts are chosen one after the other. An expert's weight is its softmax over the remaining logits that are at
    most `share` of the larger of the two below its own.
    """
    experts, weights, left = [], [], logits
    for _ in range(count):
        expert = _largest(left, 1)
        largest = left.gather(1, expert)
        far = (largest - logits) / logits.abs().clamp(min=largest) > share
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
        experts.append(expert)
    return torch.cat(experts, dim=1), torch.cat(weights, dim=1)


class Experts(nn.Module):
    """`sum of w_e down_e(act(up_e(x)))` over a token's experts, plus a shared expert if there is one."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        self.config = config
        self.collective = linear.collective
        self.router = linear(LinearSpec("router", hidden_size, (Part(config.count),), config.router_bias, exact=True))
        self.up, self.down = (linear(spec) for spec in _of_experts(config, hidden_size))
        self.shared = MLP(config.shared, hidden_size, linear.within("shared")) if config.shared is not None else None
        self.shared_gate = None
        if config.shared_gate:
            self.shared_gate = linear(LinearSpec("shared_gate", hidden_size, (Part(1),), bias=False, exact=True))
        self.scales = nn.Parameter(torch.empty(config.count)) if config.expert_scales else None
        self.biases = nn.Parameter(torch.empty(config.count)) if config.choice is not None else None
        own = Norms(pre=config.own_norms, output=config.own_norms)
        self.norms, self.shared_norms = SublayerNorms(own, hidden_size), SublayerNorms(own, hidden_size)
        self.router_norm = build_norm(config.own_norms, hidden_size)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:  # [T, d] -> [T, d]
        rows, scale = self.router_norm(x), self.config.router_scale
        chosen = routes(self.config, self.router(rows if scale == 1.0 else rows * scale), self.scales, self.biases)
        read = self.norms.pre(x)
        hidden = activated(self.config.mlp, self.up.of_experts(read[chosen.tokens], chosen.starts))
        y = weighted_sums(self.down.of_experts(hidden, chosen.starts), chosen.places, chosen.weights)
        if self.collective is not None:
            y = self.collective.sum(y)
        y = self.norms.output(y)
        if self.shared is None:
            return y
        shared = self.shared_norms.output(self.shared(self.shared_norms.pre(x), step))
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)


def _of_experts(config: ExpertsConfig, hidden_size: int) -> tuple[LinearSpec, LinearSpec]:
    """Return the specs of the projections of all experts, or of those that this rank has."""
    if config.held is None:
        return projections(config.mlp, hidden_size, config.count)
    up, down = projections(config.mlp, hidden_size, config.held[1] - config.held[0])
    return replace(up, split=Split.EXPERTS), replace(down, split=Split.EXPERTS)


def build_feed_forward(config: MLPConfig | ExpertsConfig, hidden_size: int, linear: LinearFactory) -> MLP | Experts:
    """Return the feed-forward module of a layer."""
    if isinstance(config, ExpertsConfig):
        return Experts(config, hidden_size, linear)
    return MLP(config, hidden_size, linear)
