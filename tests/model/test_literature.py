"""Properties that the literature states for each variant, on a small model with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import CPU
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    NormConfig,
    NormKind,
    RotaryConfig,
)
from triptych.model.config.cache import cached_elements
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.embeddings import SinusoidalPositions
from triptych.model.network.feed_forward import MLP
from triptych.model.network.fused_ops import rotary_tables
from triptych.model.network.inputs import StepContext, packed_input
from triptych.model.network.positions import AlibiBias, BucketBias, rotate
from triptych.model.network.stack import Stack
from triptych.model.network.transformer import Transformer

VOCAB, SIZE, HEADS, DIM, LAYERS = 50, 32, 4, 8, 3
BACKENDS = (ReferenceBackend(), SdpaBackend())
NO_ORDER = PositionConfig()
LEARNED = PositionConfig(PositionKind.LEARNED, max_positions=64)
SINUSOIDAL = PositionConfig(PositionKind.SINUSOIDAL)
ROTARY = RotaryConfig(DIM)
BUCKETS = BucketBiasConfig(num_buckets=8, max_distance=20)
SLOPES = AlibiConfig.of_heads(HEADS)
NEIGHBOURS = RotaryConfig(DIM, interleaved=True)
NORM = NormConfig(NormKind.LAYER, 1e-5)
PRE_NORM = Norms(pre=NORM)
Position = PositionConfig | RotaryConfig | BucketBiasConfig | AlibiConfig


def stack(
    *,
    kv_heads: int = HEADS,
    window: int | None = None,
    position: Position = NO_ORDER,
    causal: bool = False,
    norms: Norms = PRE_NORM,
) -> StackConfig:
    own = None if isinstance(position, PositionConfig) else position
    attention = AttentionConfig(HEADS, kv_heads, DIM, DIM**-0.5, position=own, window=window)
    layer = LayerConfig(attention, MLPConfig(48, Activation.GELU), (norms, norms))
    added = position if isinstance(position, PositionConfig) else NO_ORDER
    return StackConfig((layer,) * LAYERS, SIZE, causal=causal, position=added)


def build(config: StackConfig, backend: AttentionBackend | None = None) -> Transformer:
    """Return a model of one stack."""
    torch.manual_seed(0)
    stacks = {"decoder" if config.causal else "encoder": config}
    model = Transformer(
        ModelConfig("native", EmbeddingConfig(VOCAB, SIZE), **stacks), backend or ReferenceBackend(), LinearFactory()
    )
    for name, parameter in model.requires_grad_(False).named_parameters():
        is_gain = name.endswith("weight") and "norm" in name
        parameter.normal_(1.0 if is_gain else 0.0, 0.0 if is_gain else 0.3)
        if name.endswith("bias"):
            parameter.zero_()
    return model


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def states(model: Transformer, tokens: list[int], shift: int = 0) -> Tensor:
    """Return hidden states `[L, d]` of tokens whose positions begin at `shift`."""
    causal = model.encoder is None
    inputs = packed_input([tokens], CPU, causal=causal)
    inputs = replace(inputs, positions=inputs.positions + shift)
    with torch.inference_mode():
        return model.decode(inputs) if causal else model.encode(inputs)


def only_stack(model: Transformer) -> Stack:
    found = model.encoder or model.decoder
    assert found is not None
    return found


def name_of(position: Position) -> str:
    return position.kind if isinstance(position, PositionConfig) else type(position).__name__


class TestNorms:
    """Ba et al. 2016; the place of a norm decides what the residual stream carries (Xiong et al. 2020)."""

    @staticmethod
    def silenced(config: StackConfig) -> Tensor:
        """Return the output if every sublayer returns zeros."""
        model = build(config)
        for block in only_stack(model).layers:
            block.attn.out.weight.zero_()
            block.mlp.down.weight.zero_()
        return states(model, ids(5))

    def test_a_pre_norm_stack_carries_its_input_through(self) -> None:
        model = build(stack())
        assert model.tokens is not None
        assert torch.equal(self.silenced(stack()), model.tokens.weight[ids(5)])

    def test_a_post_norm_stack_norms_whatever_comes_in(self) -> None:
        config = stack(norms=Norms(post=NORM))
        for hidden in (self.silenced(config), states(build(config), ids(5))):
            torch.testing.assert_close(hidden.mean(-1), torch.zeros(5), atol=1e-5, rtol=0)
            torch.testing.assert_close(hidden.var(-1, unbiased=False), torch.ones(5), atol=1e-3, rtol=0)

    def test_both_slots_can_be_filled(self) -> None:
        both = states(build(stack(norms=Norms(pre=NORM, post=NORM))), ids(5))
        for one in (stack(), stack(norms=Norms(post=NORM))):
            assert (both - states(build(one), ids(5))).abs().max() > 0.1

    def test_an_rms_norm_keeps_the_mean(self) -> None:
        model = build(stack(norms=Norms(post=NormConfig(NormKind.RMS, 1e-6))))
        hidden = states(model, ids(5))
        torch.testing.assert_close(hidden.pow(2).mean(-1), torch.ones(5), atol=1e-3, rtol=0)
        assert hidden.mean(-1).abs().max() > 0.01


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.GELU: _gelu,  # Hendrycks & Gimpel 2016
    Activation.SILU: lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_layers_are_their_formulas(activation: Activation, gated: bool) -> None:
    """ReLU and GELU feed-forward layers; gated by SiLU it is SwiGLU, `(SiLU(x W) * x V) W2` (Shazeer 2020)."""
    torch.manual_seed(0)
    mlp, x = MLP(MLPConfig(6, activation, gated=gated, bias=False), 4, LinearFactory()), torch.randn(3, 4)
    for parameter in mlp.requires_grad_(False).parameters():
        parameter.normal_()
    parts = (x @ mlp.up.weight.T).split(6, dim=-1)
    inner = FORMULAS[activation](parts[0])
    step = StepContext(packed_input([[1, 2, 3]], CPU, causal=True), ReferenceBackend(), None, x.dtype)
    torch.testing.assert_close(mlp(x, step), (inner * parts[1] if gated else inner) @ mlp.down.weight.T)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_grouped_queries_are_multi_head_with_repeated_keys_and_values(kv_heads: int, backend: AttentionBackend) -> None:
    """Multi-query with one pair (Shazeer 2019), grouped-query with some (Ainslie et al. 2023)."""
    grouped, full = build(stack(kv_heads=kv_heads), backend), build(stack(), backend)
    few = grouped.state_dict()
    for name, weight in few.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.split((HEADS * DIM, kv_heads * DIM, kv_heads * DIM))
            many = [one.unflatten(0, (kv_heads, DIM)).repeat_interleave(HEADS // kv_heads, 0) for one in (k, v)]
            few[name] = torch.cat((q, *(one.flatten(0, 1) for one in many)))
    full.load_state_dict(few)
    torch.testing.assert_close(states(grouped, ids(9)), states(full, ids(9)), atol=1e-5, rtol=1e-5)
    config = replace(grouped.config, encoder=None, decoder=grouped.config.encoder)
    assert cached_elements(config.decoder) == 2 * LAYERS * DIM * kv_heads


class TestPositions:
    def test_products_of_sinusoids_depend_on_the_distance_only(self) -> None:
        """Vaswani et al. 2017, section 3.5."""
        table = SinusoidalPositions(SINUSOIDAL, SIZE)(torch.arange(100))
        products = table @ table.T
        for distance in range(0, 60, 7):
            diagonal = products.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
        assert products[0].std() > 1

    @pytest.mark.parametrize(
        ("position", "relative"), [(ROTARY, True), (BUCKETS, True), (SINUSOIDAL, False), (LEARNED, False)]
    )
    def test_a_relative_scheme_does_not_see_where_a_text_begins(self, position: Position, relative: bool) -> None:
        """Su et al. 2021 (rotary), Raffel et al. 2020 (buckets)."""
        model = build(stack(position=position))
        moved = (states(model, ids(9)) - states(model, ids(9), shift=20)).abs().max()
        assert moved < 1e-4 if relative else moved > 0.1

    def test_slopes_are_a_geometric_sequence_also_of_heads_that_are_no_power_of_two(self) -> None:
        """Press et al. 2022, section 3; between the slopes of the power below come every second of twice as many."""
        assert AlibiConfig.of_heads(8).slopes == tuple(2.0**-k for k in range(1, 9))
        twelve = AlibiConfig.of_heads(12).slopes
        assert twelve[:8] == AlibiConfig.of_heads(8).slopes
        assert twelve[8:] == pytest.approx([2.0 ** -(k + 0.5) for k in range(4)])

    def test_slopes_do_not_see_where_a_text_begins_and_fall_with_the_distance(self) -> None:
        model = build(stack(position=SLOPES, causal=True))
        assert torch.equal(states(model, ids(9)), states(model, ids(9), shift=20))
        [group] = packed_input([ids(9)], CPU, causal=True).metadata.groups
        zeros = torch.zeros(1, 9, HEADS, DIM)
        added = AlibiBias(SLOPES)(zeros, zeros, group)[0]
        assert added[1, 7, :8].tolist() == [SLOPES.slopes[1] * (key - 7) for key in range(8)]

    def test_neighbours_turn_as_halves_do_in_another_order(self) -> None:
        """Su et al. 2021, equation 15: the pairing of dimensions only permutes the weights."""
        x = torch.randn(9, HEADS, DIM, generator=torch.Generator().manual_seed(0))
        order = torch.arange(DIM).view(2, -1).T.flatten()  # 0 4 1 5 ...: the halves interleaved
        turned = {one.interleaved: rotary_tables(one, torch.arange(9), x.dtype) for one in (ROTARY, NEIGHBOURS)}
        halves, neighbours = rotate(x, turned[False]), rotate(x[..., order], turned[True], interleaved=True)
        torch.testing.assert_close(neighbours, halves[..., order])

    @pytest.mark.parametrize("position", [LEARNED, SINUSOIDAL, ROTARY, BUCKETS, NEIGHBOURS])
    def test_every_scheme_sees_the_order(self, position: Position) -> None:
        model, tokens = build(stack(position=position)), ids(9)
        assert (states(model, tokens) - states(model, tokens[::-1]).flip(0)).abs().max() > 0.1

    def test_without_positions_attention_is_permutation_equivariant(self) -> None:
        """Lee et al. 2019; therefore a Transformer needs positions."""
        model, tokens = build(stack()), ids(9)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
        permuted = states(model, [tokens[at] for at in order])
        torch.testing.assert_close(permuted, states(model, tokens)[order], atol=1e-5, rtol=1e-5)

    def test_buckets_are_exact_nearby_logarithmic_afar_and_end(self) -> None:
        config = BucketBiasConfig(num_buckets=32, max_distance=128)
        bucket = BucketBias(config, 1, bidirectional=False).bucket(-torch.arange(1000))
        assert bucket[:16].tolist() == list(range(16))
        widths = torch.unique_consecutive(bucket[16:128], return_counts=True)[1]
        assert (widths.diff() >= -1).all() and widths[-1] > 4 * widths[0]
        assert set(bucket[128:].tolist()) == {31}

    @pytest.mark.parametrize("position", [LEARNED, SINUSOIDAL], ids=name_of)
    def test_positions_can_be_injected_at_every_layer(self, position: PositionConfig) -> None:
        """Dehghani et al. 2019, section 2.1."""
        model = build(stack(position=replace(position, every_layer=True)))
        encoder, inputs = only_stack(model), packed_input([ids(9)], CPU, causal=False)
        assert encoder.positions is not None
        with torch.inference_mode():
            x = model.embed_tokens(inputs.input_ids)
            step = StepContext(inputs, model.backend, None, x.dtype)
            for index in range(LAYERS):
                x = encoder.layer(index)(x + encoder.positions(inputs.positions), step, None)
        torch.testing.assert_close(states(model, ids(9)), x)
        assert (x - states(build(stack(position=position)), ids(9))).abs().max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
class TestWindows:
    """Through L layers of windows of w tokens on either side, information travels exactly L (w - 1) places."""

    WINDOW = 3
    REACH = LAYERS * (WINDOW - 1)

    def changed(self, backend: AttentionBackend, length: int, at: int, **changes: Any) -> list[int]:
        """Return the places where outputs change when the token at `at` is changed."""
        model, tokens = build(stack(window=self.WINDOW, **changes), backend), ids(length)
        other = [*tokens[:at], (tokens[at] + 1) % VOCAB, *tokens[at + 1 :]]
        return (states(model, tokens) != states(model, other)).any(-1).nonzero().flatten().tolist()

    @pytest.mark.parametrize("at", [0, 10, 20])
    def test_information_travels_as_far_as_the_windows_reach(self, backend: AttentionBackend, at: int) -> None:
        expected = [place for place in range(21) if abs(place - at) <= self.REACH]
        assert self.changed(backend, 21, at) == expected

    def test_and_forwards_only_under_a_causal_mask(self, backend: AttentionBackend) -> None:
        assert self.changed(backend, 21, 10, causal=True) == list(range(10, 10 + self.REACH + 1))

    def test_no_token_can_tell_a_long_palindrome(self, backend: AttentionBackend) -> None:
        """Whether the ends are equal is known only where both have arrived: beyond 2 L (w - 1) + 1 tokens nowhere."""
        longest = 2 * self.REACH + 1
        for length, somewhere in ((longest, True), (longest + 1, False)):
            of_first, of_last = (set(self.changed(backend, length, at)) for at in (0, length - 1))
            assert bool(of_first & of_last) == somewhere


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("position", [NO_ORDER, LEARNED, ROTARY, BUCKETS], ids=name_of)
def test_under_a_causal_mask_a_later_token_changes_no_earlier_output(
    position: Position, backend: AttentionBackend
) -> None:
    for causal in (True, False):
        model, tokens = build(stack(position=position, causal=causal), backend), ids(12)
        before, after = states(model, tokens), states(model, [*tokens[:8], *ids(4, seed=5)])
        assert torch.equal(before[:8], after[:8]) == causal
        assert (before[8:] != after[8:]).any(-1).all()


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_scaled_scores_have_variance_one(dim: int) -> None:
    """q . k of independent unit components has variance d_k; divided by sqrt(d_k) it has 1 (Vaswani et al. 2017)."""
    torch.manual_seed(0)
    config = AttentionConfig(1, 1, dim, dim**-0.5)
    products = (torch.randn(20_000, dim) * torch.randn(20_000, dim)).sum(-1)
    assert products.var().item() == pytest.approx(dim, rel=0.05)
    assert (products * config.scale).var().item() == pytest.approx(1, rel=0.05)
