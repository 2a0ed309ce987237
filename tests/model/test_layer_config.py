"""Stacks whose layers differ: invalid ones are refused, and each layer is computed by its own settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model.checkpoints import CPU, VOCAB, copy_weights, native_backends, prompt
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    NormConfig,
    NormKind,
    NormSpan,
    RotaryConfig,
)
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.helpers import repeat
from triptych.model.inspection.anatomy import describe_stack, dissect
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.inputs import StepContext, packed_input
from triptych.model.network.native_stack import attach_native_stacks, native_linears
from triptych.model.network.transformer import Transformer

SIZE = 32
RMS = NormConfig(NormKind.RMS, 1e-6)
ATTENTION = AttentionConfig(4, 2, 8, 8**-0.5)
LAYER = LayerConfig(ATTENTION, MLPConfig(48, Activation.SILU), (Norms(pre=RMS), Norms(pre=RMS)))
ALL, OWN = NormSpan.ALL_HEADS, NormSpan.OWN_GAINS
# Windows, two rotary bases, other heads, other widths, norms in all slots and over all spans, scores with slopes.
DIFFERENT = (
    replace(LAYER, mixer=replace(ATTENTION, window=3, position=RotaryConfig(8))),
    replace(LAYER, mixer=replace(ATTENTION, position=RotaryConfig(4, 500.0), qk_norm=RMS)),
    replace(LAYER, mixer=replace(ATTENTION, num_kv_heads=4), feed_forward=MLPConfig(20, Activation.GELU, gated=True)),
    replace(LAYER, norms=(Norms(RMS, RMS, RMS), Norms(output=NormConfig(NormKind.LAYER, 1e-5)))),
    replace(LAYER, mixer=replace(ATTENTION, position=BucketBiasConfig(8, 20, shared=False)), parallel=True),
    replace(LAYER, mixer=replace(ATTENTION, position=RotaryConfig(6, interleaved=True), qk_norm=RMS, qk_norm_span=OWN)),
    replace(LAYER, mixer=replace(ATTENTION, position=RotaryConfig(8), qk_norm=RMS, qk_norm_span=ALL)),
    replace(LAYER, mixer=replace(ATTENTION, position=AlibiConfig.of_heads(4), window=4), residual_scale=0.3),
    replace(LAYER, norms=(Norms(pre=RMS), Norms()), parallel=True, one_norm=True, residual_scale=0.7),
)


def stack(*layers: LayerConfig) -> StackConfig:
    return StackConfig(layers, SIZE, causal=True, final_norm=RMS)


def build(config: StackConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig("any", EmbeddingConfig(VOCAB, SIZE), decoder=config), ReferenceBackend(), LinearFactory()
    )
    for parameter in model.requires_grad_(False).parameters():
        parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "layers must be positive"),
        ((replace(LAYER, shares_weights_with=0),), "layer 0 shares weights with 0, which is no equal layer before it"),
        ((LAYER, replace(DIFFERENT[0], shares_weights_with=0)), "layer 1 shares weights with 0"),
        ((LAYER, replace(LAYER, norms=(Norms(),) * 3, cross=ATTENTION)), "in all layers of a stack or in none"),
        (
            [replace(LAYER, mixer=replace(ATTENTION, position=BucketBiasConfig(count))) for count in (8, 16)],
            "must agree on its heads and buckets",
        ),
    ],
)
def test_stacks_that_cannot_be_are_refused(layers: tuple[LayerConfig, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stack(*layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(norms=(Norms(),)), "2 sublayers needs as many norms, found 1"),
        (dict(cross=ATTENTION), "3 sublayers needs as many norms, found 2"),
        (dict(cross=DIFFERENT[0].attention, norms=(Norms(),) * 3), "neither positions nor a window"),
        (dict(parallel=True, norms=(Norms(post=RMS),) * 2), "neither cross attention nor norms after its sum"),
        (dict(one_norm=True, norms=(Norms(pre=RMS), Norms())), "one norm for both sublayers is the mixer's"),
        (dict(residual_scale=0.5, norms=(Norms(output=RMS),) * 2), "a layer with output norms scales nothing"),
    ],
)
def test_layers_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LAYER, **change)


@pytest.mark.parametrize("count", [0, -1, 10**12])
def test_a_number_of_layers_that_is_none_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="the number of layers must be from 1 to"):
        repeat(LAYER, count)


def test_equal_layers_stay_one_object_under_changes() -> None:
    config = stack(*repeat(LAYER, 3), DIFFERENT[0], LAYER)
    changed = config.with_layers(lambda layer: replace(layer, parallel=True))
    assert {id(layer) for layer in changed.layers} == {id(changed.layers[0]), id(changed.layers[3])}
    assert changed.layers[4] is changed.layers[0] != LAYER
    shared = Shard(1, 2).config(ModelConfig("any", EmbeddingConfig(VOCAB, SIZE), decoder=config)).decoder
    assert shared is not None and len({id(layer) for layer in shared.layers}) == 2


def test_layers_find_the_weights_that_they_share() -> None:
    config = stack(LAYER, DIFFERENT[0], replace(LAYER, shares_weights_with=0), DIFFERENT[1])
    assert config.weights_of == (0, 1, 0, 2)
    model = build(config)
    assert model.decoder is not None
    assert model.decoder.layer(2) is model.decoder.layer(0)
    anatomy = dissect(model.config)
    # The MLPs are alike: four are computed, three are kept.
    assert anatomy.flops("decoder", 1).feed_forward == 4 * 2 * anatomy.parameters["decoder MLP"] // 3


def test_each_layer_is_computed_as_it_says() -> None:
    model, inputs = build(stack(*DIFFERENT)), packed_input([prompt(9), prompt(4)], CPU, causal=True)
    assert model.decoder is not None
    x = model.embed_tokens(inputs.input_ids)
    for index, layer in enumerate(DIFFERENT):  # as the only layer of a stack, with its weights of this one
        alone = build(stack(layer))
        assert alone.decoder is not None
        alone.decoder.layers[0].load_state_dict(model.decoder.layer(index).state_dict())
        x = alone.decoder.layer(0)(x, StepContext(inputs, model.backend, None, x.dtype), None)
    assert torch.equal(model.decode(inputs), model.decoder.final_norm(x))


@pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
def test_each_layer_is_computed_in_c_as_it_says() -> None:
    model, inputs = build(stack(*DIFFERENT)), packed_input([prompt(9), prompt(4)], CPU, causal=True)
    expected = model.decode(inputs)
    linear = native_linears(model.config, torch.float32, native_backends()[0].library)
    in_c = Transformer(model.config, model.backend, linear)
    copy_weights(model, in_c)
    attach_native_stacks(in_c)
    assert in_c.decoder is not None and in_c.decoder.runner is not None
    torch.testing.assert_close(in_c.decode(inputs), expected, atol=1e-5, rtol=1e-5)


def test_what_differs_is_said_of_the_layers_that_have_it() -> None:
    words = describe_stack(stack(*repeat(DIFFERENT[0], 5), DIFFERENT[1], DIFFERENT[0]))
    assert words["attention"] == "causal, window 3 (layers 0-4, 6); causal (layer 5)"
    assert words["positions"] == "rotary of base 10000 (layers 0-4, 6); rotary of base 500 (layer 5)"
    assert words["norms"] == "rms pre-norm, final norm"
    assert describe_stack(stack(DIFFERENT[5]))["positions"] == "rotary of neighbours"
    assert describe_stack(stack(DIFFERENT[7]))["positions"] == "slopes of scores"
    assert describe_stack(stack(DIFFERENT[8]))["norms"] == "rms pre-norm for both sublayers, final norm"
    capped = replace(LAYER, mixer=replace(ATTENTION, window=7, softcap=50.0))
    assert describe_stack(stack(capped))["attention"] == "causal, window 7, softcap 50"
    assert describe_stack(stack(*DIFFERENT[2:4]))["norms"] == (
        "rms pre-norm (layer 0); rms and layer pre and output and post-norm (layer 1), final norm"
    )


def test_numbers_that_must_be_whole_are_refused_at_any_depth() -> None:
    broken = replace(LAYER, mixer=replace(ATTENTION, window=2.5))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window must be a whole number, found 2\.5"):
        ModelConfig("llama", EmbeddingConfig(VOCAB, SIZE), decoder=StackConfig((LAYER, broken), SIZE, causal=True))


@pytest.mark.parametrize("scale", [(-4) ** -0.5, float("nan"), float("inf"), "0.5"])
def test_numbers_that_must_be_finite_are_refused_at_any_depth(scale: object) -> None:
    broken = replace(LAYER, mixer=replace(ATTENTION, scale=scale))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scale must be a finite number, found"):
        ModelConfig("llama", EmbeddingConfig(VOCAB, SIZE), decoder=StackConfig((LAYER, broken), SIZE, causal=True))
