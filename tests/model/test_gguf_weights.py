"""GGUF files: their number formats, settings and tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import CPU, load_native, native_backends, saved
from tests.model.gguf_files import Blocks, conversions, converted, write_gguf
from tests.model.parity import decoder_logits
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.checkpoint.gguf.blocks import FORMATS
from triptych.model.checkpoint.gguf.metadata import factor_settings
from triptych.model.checkpoint.tensor_files import TensorReader, TensorSource
from triptych.model.checkpoint.tensor_sources import tensor_sources
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.config.attention import BucketBiasConfig, RopeScaling, RotaryConfig
from triptych.model.config.formats import Storage, integers_in_groups
from triptych.model.config.layer import ExpertsConfig, LayerConfig
from triptych.model.config.model import ModelConfig
from triptych.model.engine.model_info import weight_bytes
from triptych.model.engine.planning.memory_plan import plan_weights
from triptych.model.errors import ConfigError
from triptych.model.gguf.container import read_gguf
from triptych.model.gguf.types import BLOCK_TYPES
from triptych.model.inspection.anatomy import dissect
from triptych.model.linear.factory import LinearFactory
from triptych.model.llm import LLM
from triptych.model.network.native_stack import native_linears
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.network.parameter_counts import parameters_by_part
from triptych.model.network.positions import rotary_frequencies
from triptych.model.network.weights import load_model, stored_tensors
from triptych.model.pretrained import embedded_models
from triptych.service.core.models_folder import ModelsFolder

# Offsets of the last bytes of a block's float16 numbers, which must not become infinite, and a digest of the values
# that `gguf.dequantize` (gguf 0.19) gives for blocks of bytes from SHA-256.
DEQUANTISED: dict[str, tuple[tuple[int, ...], str]] = {
    "Q4_0": ((1,), "daacdb3426dfd246"),
    "Q4_1": ((1, 3), "5437a0d2121f43b8"),
    "Q5_0": ((1,), "5ef2f60d6dee8ef1"),
    "Q5_1": ((1, 3), "07e1775ec7f3e666"),
    "Q8_0": ((1,), "d8e5e6a4e520811c"),
    "Q2_K": ((81, 83), "0ac6d81aedbcedeb"),
    "Q3_K": ((109,), "d79653b0a1251ec0"),
    "Q4_K": ((1, 3), "4db0b6674e598f7f"),
    "Q5_K": ((1, 3), "5b0aa17d73cc3d8b"),
    "Q6_K": ((209,), "035a9755d496a433"),
    "IQ4_NL": ((1,), "43c9be665121a0c4"),
    "IQ4_XS": ((1,), "13fe14b9aa742d67"),
    "MXFP4": ((), "d3f93318a8c0a47c"),
    "IQ1_S": ((1,), "4b977f61475b4e62"),
    "IQ1_M": ((55,), "263807effc4ca444"),
    "IQ2_XXS": ((1,), "6c84fcd4884eb210"),
    "IQ2_XS": ((1,), "5f4eb194a9ae31a4"),
    "IQ2_S": ((1,), "3637c879c3d4cc17"),
    "IQ3_XXS": ((1,), "a2160676d1ae9412"),
    "IQ3_S": ((1,), "d26ffbbc221d38ca"),
    "TQ1_0": ((53,), "7d6388d8793c2ee3"),
    "TQ2_0": ((65,), "36fad20e2740a4b0"),
}


def stream(count: int, seed: str) -> bytes:
    """Return pseudo-random bytes that are the same on every machine."""
    parts = (hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(-(-count // 32)))
    return b"".join(parts)[:count]


def blocks_of(name: str, count: int, seed: str = "") -> bytes:
    """Return random blocks of a format, without infinities."""
    size = next(kind.bytes for kind in BLOCK_TYPES.values() if kind.name == name)
    data = bytearray(stream(size * count, name + seed))
    for block in range(count):
        for place in DEQUANTISED[name][0]:
            data[block * size + place] &= 0xBF
    return bytes(data)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_numbers_are_those_that_ggml_computes_bit_for_bit(name: str) -> None:
    size = next(kind.bytes for kind in BLOCK_TYPES.values() if kind.name == name)
    blocks = torch.frombuffer(bytearray(blocks_of(name, 64)), dtype=torch.uint8).view(64, size)
    values = FORMATS[name].values(blocks).numpy()
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == DEQUANTISED[name][1]


def plain(config: ModelConfig, kind: str) -> ModelConfig:
    """Return the configuration without what GGUF cannot store: training heads, and one constant of Gemma and T5."""
    changes: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    changes |= {"masked_head": None, "pooler": False, "in_order": frozenset(), "text_type": None, "unread_pictures": ""}
    if kind in _READ_AS:
        changes["model_type"] = _READ_AS[kind]
    if kind in ("nomic-bert", "hunyuan"):  # the conversion uses another length
        changes["max_positions"] = 2048
    for name, stack in config.stacks.items():
        if kind.startswith(("gemma2", "gemma3")):  # query_pre_attn_scalar
            stack = stack.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, scale=1.0)))
        if kind in ("smollm3", "starcoder2"):  # windows, and which layers have no positions
            stack = stack.with_layers(without_windows)
        if "t5" in kind:
            stack = stack.with_layers(reach_far)
        if "falcon" in kind:
            stack = stack.with_layers(with_published_base)
        if kind in _PLAIN:
            stack = stack.with_layers(_PLAIN[kind])
        if kind == "gpt-oss":
            stack = stack.with_layers(without_bounds)
        changes[name] = stack
    return replace(config, **changes)


_READ_AS = {"mt5": "t5", "qwen2-5-vl": "qwen2", "gemma4-unified": "gemma4_text", "qwen3-next-every": "qwen3_5_moe_text"}


def with_published_base(layer: LayerConfig) -> LayerConfig:
    """Return the layer with Falcon's own rotary base, which GGUF does not store."""
    return replace(layer, mixer=replace(layer.attention, position=RotaryConfig(layer.attention.head_dim)))


def without_bounds(layer: LayerConfig) -> LayerConfig:
    """Return the layer without gpt-oss' bounds of gates, which GGUF does not store."""
    assert isinstance(layer.feed_forward, ExpertsConfig)
    mlp = replace(layer.feed_forward.mlp, clamp=None)
    return replace(layer, feed_forward=replace(layer.feed_forward, mlp=mlp))


def reach_far(layer: LayerConfig) -> LayerConfig:
    """Return the layer with T5's own distance, which GGUF does not store."""
    assert isinstance(layer.attention.position, BucketBiasConfig)
    return replace(layer, mixer=replace(layer.attention, position=replace(layer.attention.position, max_distance=128)))


def without_windows(layer: LayerConfig) -> LayerConfig:
    return replace(layer, mixer=replace(layer.attention, window=None, position=None))


def without_a_window(layer: LayerConfig) -> LayerConfig:
    return replace(layer, mixer=replace(layer.attention, window=None))


def with_position(**changes: Any) -> Callable[[LayerConfig], LayerConfig]:
    """Return a change of rotary settings that GGUF stores differently, or not at all."""

    def change(layer: LayerConfig) -> LayerConfig:
        position = layer.attention.position
        assert isinstance(position, RotaryConfig)
        return replace(layer, mixer=replace(layer.attention, position=replace(position, **changes)))

    return change


def without_what_phi_has(layer: LayerConfig) -> LayerConfig:
    """Return the layer without the position temperatures of Phi-3.5-MoE and its router's tolerance."""
    assert isinstance(layer.feed_forward, ExpertsConfig)
    layer = replace(layer, feed_forward=replace(layer.feed_forward, mixer_tolerance=None))
    return with_position(attention_factor=1.0, long_attention_factor=None)(layer)


_PLAIN = {
    "dots1": without_a_window,
    "phimoe": without_what_phi_has,
    "qwen2-5-vl": with_position(sections=()),  # of pictures, which GGUF files of texts do not have
    "hunyuan": with_position(theta=1.0),  # the conversion stretches Tencent's own base
}


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return dict(stored_tensors(load_model(checkpoint, SdpaBackend())))


@pytest.mark.parametrize("kind", [kind for kind in conversions() if kind not in ("roberta", "bert-no-pooler")])
def test_what_llama_cpp_converts_is_read_back(kind: str, tmp_path: Path) -> None:
    """Settings are equal, and tensors bit for bit, except those stored plus 1 or as an exponential."""
    period = {"attention__sliding_window_pattern": ("UINT32", 3)} if kind.startswith("gemma3") else {}  # ours is short
    original, read = read_checkpoint(saved(kind).path), read_checkpoint(converted(kind, tmp_path, **period))
    expected = plain(original.config, kind)
    if kind == "llama-llama3":  # whose factors say nothing of the context that they were made for
        position = read.config.decoder.layers[0].attention.position  # type: ignore[union-attr]
        expected = replace(
            expected,
            decoder=expected.decoder.with_layers(  # type: ignore[union-attr]
                lambda layer: replace(layer, mixer=replace(layer.attention, position=position))
            ),
        )
    assert plain(read.config, kind) == expected
    before, after = (dict(load_model(one, SdpaBackend()).named_parameters()) for one in (original, read))
    assert before.keys() == after.keys()
    shifted = "gemma" in kind or kind == "nemotron" or kind.startswith("qwen3-5") or kind == "qwen3-next-every"
    close = [name for name in before if shifted and ("norm" in name or name.endswith("decay"))]
    assert all(torch.equal(before[name], after[name]) for name in before if name not in close)
    assert all(torch.allclose(before[name], after[name], atol=2e-7) for name in close)


def test_positions_of_a_roberta_begin_at_zero(tmp_path: Path) -> None:
    """llama.cpp converts it to a BERT, without the rows of its table that belong to no position."""
    config = read_checkpoint(converted("roberta", tmp_path)).config
    assert config.encoder is not None and config.encoder.position is not None
    assert (config.model_type, config.max_positions, config.encoder.position.offset) == ("bert", 64, 0)
    before, after = (tensors_of(read_checkpoint(path)) for path in (saved("roberta").path, tmp_path / "roberta.gguf"))
    table = "embeddings.position_embeddings.weight"
    assert torch.equal(before[table][2:], after[table])
    assert all(torch.equal(before[name], after[name]) for name in after if name != table)


def test_tensors_that_do_not_fit_are_told_with_the_metadata(tmp_path: Path) -> None:
    file = converted("llama", tmp_path, feed_forward_length=("UINT32", 24))
    with pytest.raises(ConfigError, match="the tensors do not fit its metadata; misshaped: "):
        load_model(read_checkpoint(file), SdpaBackend())


def test_factors_of_llama_3_are_the_same(tmp_path: Path) -> None:
    paths = (saved("llama-llama3").path, converted("llama-llama3", tmp_path))
    made, read = (read_checkpoint(path).config.decoder.layers[0].attention.position for path in paths)  # type: ignore[union-attr]
    assert isinstance(made, RotaryConfig) and isinstance(read, RotaryConfig)
    assert torch.allclose(rotary_frequencies(made, CPU), rotary_frequencies(read, CPU), rtol=1e-5)


def factors(original: float, low: float, high: float, factor: float, theta: float, dim: int) -> list[float]:
    """Return the factors that a conversion stores for such settings."""
    config = RotaryConfig(
        dim,
        theta,
        RopeScaling.LLAMA3,
        factor=factor,
        original_max_positions=original,  # type: ignore[arg-type]
        low_freq_factor=low,
        high_freq_factor=high,
    )
    plain = rotary_frequencies(RotaryConfig(dim, theta), CPU)
    return (plain / rotary_frequencies(config, CPU)).tolist()


@pytest.mark.parametrize(
    ("original", "low", "high", "factor"),
    [(8192, 1, 4, 8), (8192, 1, 4, 32), (4096, 1, 8, 4), (2048, 2, 4, 8)],
)
def test_settings_of_llama_3_are_found_again(original: int, low: float, high: float, factor: float) -> None:
    found = factor_settings(factors(original, low, high, factor, 500_000.0, 128), 500_000.0, 128, 8192, "x.gguf")
    assert found["factor"] == pytest.approx(factor)
    ratios = (
        found[name] / found["low_freq_factor"] for name in ("original_max_position_embeddings", "high_freq_factor")
    )
    assert list(ratios) == pytest.approx([original / low, high / low], rel=1e-3)


def test_factors_of_another_rule_are_kept_as_they_are(tmp_path: Path) -> None:
    found = factor_settings([1.0, 2.0, 3.0, 3.5], 10_000.0, 8, 64, "x.gguf")
    lists = {"short_factor": [1.0, 2.0, 3.0, 3.5], "long_factor": [1.0, 2.0, 3.0, 3.5]}
    assert found == {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": 64}
    for wrong in ([1.0] * 5, [1.0, 0.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [math.inf] * 4, [math.nan] * 4):
        with pytest.raises(ConfigError, match="does not fit heads of 8"):
            factor_settings(wrong, 10_000.0, 8, 64, "x.gguf")
    path = converted(
        "llama-llama3", tmp_path, lambda name, one: torch.tensor([2.0, 0.5, 4.0, 1.0]) if "rope" in name else one
    )
    config = read_checkpoint(path).config
    position = config.decoder.layers[0].attention.position  # type: ignore[union-attr]
    assert isinstance(position, RotaryConfig) and config.short_context is None
    plain = rotary_frequencies(RotaryConfig(8, position.theta), CPU)
    assert torch.allclose(rotary_frequencies(position, CPU), plain / torch.tensor([2.0, 0.5, 4.0, 1.0]))


def quantised(into: Path, types: dict[str, str], *, hidden: int = 256, heads: int = 4) -> Path:
    """Write a Llama of one layer whose matrices are random blocks of these types; other tensors are F32."""
    inner, vocab, kv = 512, 64, hidden // 2
    shapes = {
        "token_embd": (vocab, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {
        f"{name}.weight": torch.ones(hidden) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    for name, shape in shapes.items():
        kind = types.get(name.rpartition(".")[2], "F32")
        if kind == "F32":
            tensors[f"{name}.weight"] = 0.05 * torch.randn(shape, generator=generator)
            continue
        block = next(one for one in BLOCK_TYPES.values() if one.name == kind)
        data = small(kind, shape[0] * shape[1] // block.block, name)
        tensors[f"{name}.weight"] = (kind, shape, data)
    numbers = {"context_length": 64, "embedding_length": hidden, "block_count": 1, "feed_forward_length": inner}
    numbers |= {"attention.head_count": heads, "attention.head_count_kv": heads // 2}
    metadata: dict[str, tuple[str, Any]] = {"general.architecture": ("STRING", "llama")}
    metadata |= {f"llama.{key}": ("UINT32", value) for key, value in numbers.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = ("FLOAT32", 1e-5)
    metadata["tokenizer.ggml.model"] = ("STRING", "none")
    return write_gguf(into / "quantised.gguf", metadata, tensors)


def small(kind: str, count: int, seed: str) -> bytes:
    """Return random blocks whose float16 factors are positive and about 0.001."""
    size = next(one.bytes for one in BLOCK_TYPES.values() if one.name == kind)
    data = bytearray(stream(size * count, kind + seed))
    for block in range(count):
        for place in DEQUANTISED[kind][0]:
            data[block * size + place] = 0x14 if "_K" not in kind else 0x08
    return bytes(data)


MIXED = {
    "q4": {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q4_0", "attn_output": "Q4_1", "ffn_down": "IQ4_NL"},
    "k": {**dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), "Q4_K"), "attn_v": "Q6_K", "ffn_down": "Q6_K"},
    "q5": {
        **dict(attn_q="Q5_0", attn_k="Q5_1", attn_v="Q8_0"),
        **dict(ffn_gate="Q5_K", ffn_up="Q8_0", ffn_down="IQ4_XS", token_embd="Q6_K"),
    },
    "halves": {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "F32", "ffn_down": "Q3_K", "attn_output": "Q2_K"},
    "grids": {
        **dict(attn_q="IQ2_XXS", attn_k="IQ3_XXS", attn_v="IQ3_S", attn_output="TQ2_0"),
        **dict(ffn_gate="IQ1_S", ffn_up="IQ2_S", ffn_down="TQ1_0", token_embd="IQ2_XS"),
    },
}
KEPT: dict[str, dict[str, Storage]] = {
    "q4": {
        "qkv": integers_in_groups(4, 32, offsets=False),
        "out": integers_in_groups(4, 32, offsets=True),
        "down": integers_in_groups(8, 32, offsets=False),
    },
    "k": {
        "qkv": Storage("Q4_K and Q6_K", nearest=(8, 32)),
        "up": integers_in_groups(4, 32, offsets=True),
        "down": Storage("Q6_K", nearest=(8, 32)),
    },
    "q5": {
        "qkv": integers_in_groups(8, 32, offsets=True),
        "up": integers_in_groups(8, 32, offsets=True),
        "down": integers_in_groups(8, 32, offsets=False),
        "head": Storage("Q6_K", nearest=(8, 32)),
    },
    "halves": {"down": Storage("Q3_K", nearest=(8, 32)), "out": Storage("Q2_K", nearest=(8, 32))},
    "grids": {
        "qkv": integers_in_groups(8, 32, offsets=False),
        "out": integers_in_groups(4, 32, offsets=False),
        "up": Storage("IQ1_S and IQ2_S", nearest=(8, 32)),
        "down": integers_in_groups(4, 32, offsets=False),
        "head": Storage("IQ2_XS", nearest=(8, 32)),
    },
}


def test_a_head_that_repeats_the_token_table_counts_once(tmp_path: Path) -> None:
    plain = read_checkpoint(quantised(tmp_path, {})).config
    repeated = read_checkpoint(quantised(tmp_path, {"token_embd": "Q6_K"})).config
    assert plain.head is not None and plain.head.tied and repeated.head is not None and not repeated.head.tied
    assert parameters_by_part(plain) == parameters_by_part(repeated)
    assert dissect(plain).total_parameters == dissect(repeated).total_parameters


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q5_0", "Q8_0", "IQ4_XS", "TQ2_0", "MXFP4", "Q4_1", "Q6_K"])
def test_a_table_that_the_head_repeats_exactly_is_kept_once(kind: str, tmp_path: Path) -> None:
    """The same bits are looked up in the head's panels; with offsets or smaller groups both are kept."""
    checkpoint, library = read_checkpoint(quantised(tmp_path, {"token_embd": kind})), native_backends()[0].library
    ids, both = torch.arange(64), kind in ("Q4_1", "Q6_K")
    for dtype in (torch.float32, torch.bfloat16):
        linear = native_linears(checkpoint.config, dtype, library)
        model = load_model(checkpoint, SdpaBackend(), linear)
        expected = load_model(checkpoint, SdpaBackend(), LinearFactory(dtype)).embed_tokens(ids)
        assert ("tokens.weight" in dict(model.named_parameters())) == both
        assert torch.equal(model.embed_tokens(ids), expected) and expected.dtype is dtype
        assert plan_weights(checkpoint, linear).total == weight_bytes(model)


@pytest.mark.parametrize("name", MIXED)
def test_projections_are_kept_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """A fused matrix has a storage that holds all its parts; it has floats if one part has floats."""
    checkpoint = read_checkpoint(quantised(tmp_path, MIXED[name]))
    kept = {target.rpartition(".")[2]: storage for target, storage in checkpoint.config.stored_as.items()}
    assert kept == KEPT[name]


@pytest.mark.parametrize("name", MIXED)
def test_what_is_read_stands_for_the_stored_numbers(name: str, tmp_path: Path) -> None:
    """Integers times scales are the file's numbers within float32's rounding, floats are equal; rows are in order."""
    path = quantised(tmp_path, MIXED[name])
    checkpoint, model = read_checkpoint(path), read_gguf(path)
    sources = tensor_sources(checkpoint)
    with TensorReader(sources) as reader:
        for part, kind in MIXED[name].items():
            stored = model.tensors[f"{'' if part == 'token_embd' else 'blk.0.'}{part}.weight"]
            data = path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
            if kind == "F32":
                continue
            blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, stored.type.bytes)
            expected = FORMATS[kind].values(blocks).view(stored.shape)
            if part in ("attn_q", "attn_k"):
                expected = expected.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
            found = read_projection(reader, sources, PUBLISHED[part], stored.shape)
            if not found[1]:
                assert torch.equal(found[0], expected), part
            limit = 1e-6 * expected.view(len(expected), -1, 32).abs().amax(dim=2).repeat_interleave(32, dim=1)
            assert ((found[0] - expected).abs() <= limit + 1e-12).all(), part


PUBLISHED = {
    **{f"attn_{part}": f"model.layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_output": "model.layers.0.self_attn.o_proj",
    "token_embd": "lm_head",
}


def read_projection(
    reader: TensorReader, sources: dict[str, TensorSource], name: str, shape: tuple[int, ...]
) -> tuple[Tensor, bool]:
    """Return a projection's matrix, and whether it is kept as integers; rows are read in odd pieces."""
    rows = [
        reader.region(f"{name}.weight", shape[1], slice(0, shape[1]), first, min(first + 37, shape[0]))
        for first in range(0, shape[0], 37)
    ]
    matrix = torch.cat(rows)
    if f"{name}.weight_scale" not in sources:
        return matrix, False
    groups = slice(0, shape[1] // 32)
    scale = reader.region(f"{name}.weight_scale", groups.stop, groups, 0, shape[0])
    found = matrix.float() * scale.repeat_interleave(32, dim=1)
    if f"{name}.weight_offset" in sources:
        found += reader.region(f"{name}.weight_offset", groups.stop, groups, 0, shape[0]).repeat_interleave(32, dim=1)
    return found, True


def in_blocks(kind: str, name: str, shape: tuple[int, ...]) -> tuple[bytes, Tensor]:
    """Return random blocks of a type with small factors, and the numbers that they stand for."""
    block = next(one for one in BLOCK_TYPES.values() if one.name == kind)
    count = math.prod(shape) // block.block
    blocks = torch.frombuffer(bytearray(stream(count * block.bytes, kind + name)), dtype=torch.uint8)
    blocks = blocks.view(count, block.bytes)
    factor = {"MXFP4": (121,), "Q8_0": (0, 0x18)}[kind]  # 2^-7, and the float16 0.002
    blocks[:, : len(factor)] = torch.tensor(factor, dtype=torch.uint8)
    return blocks.numpy().tobytes(), FORMATS[kind].values(blocks).view(shape)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "gpt-neox",
        "qwen3-5-thrice",
        "qwen3-next-every",
        "gpt-oss",
        "cohere2-windows",
        "olmo",
        "gpt-bigcode",
        "glm",
    ],
)
def test_matrices_in_other_orders_stand_for_the_stored_numbers(kind: str, tmp_path: Path) -> None:
    """A file of blocks gives the same logits as one with the floats that the blocks stand for."""
    block = "MXFP4" if kind == "gpt-oss" else "Q8_0"

    def blocks(name: str, tensor: Tensor) -> Blocks | Tensor:
        if tensor.shape[-1] % 32 or tensor.ndim < 2 or "embd" in name or name.endswith("bias"):
            return tensor
        return block, tuple(tensor.shape), in_blocks(block, name, tuple(tensor.shape))[0]

    def numbers(name: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(blocks(name, tensor), Tensor) else in_blocks(block, name, tuple(tensor.shape))[1]

    models = []
    for stored_as in (blocks, numbers):
        checkpoint = read_checkpoint(converted(kind, tmp_path, stored_as))
        models.append(load_model(checkpoint, SdpaBackend()))
        if stored_as is blocks:
            kept = checkpoint.config.stored_as
            assert len(kept) > 4 and set(kept.values()) == {integers_in_groups(8, 32, offsets=False)}
    found, expected = (decoder_logits(model, [tuple(range(1, 40))]) for model in models)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
    assert expected.std() > 0.1


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma4-experts"])
def test_fused_matrices_are_read_in_their_parts(kind: str, tmp_path: Path) -> None:
    """llama.cpp's conversion fuses q, k and v of any architecture where it is asked to (`--fuse-qkv`)."""
    parts: dict[str, Tensor] = {}
    path = converted(kind, tmp_path, lambda name, tensor: parts.setdefault(name, tensor))
    expected = decoder_logits(load_model(read_checkpoint(path), SdpaBackend()), [tuple(range(1, 20))])
    model = read_gguf(path)
    metadata = {key: _entry(kind, key) for key in model}
    fused = {name: one for name, one in parts.items() if ".attn_q." not in name}
    for name in [name for name in fused if ".attn_k." in name or ".attn_v." in name]:
        layer = name.split(".attn_")[0]
        three = [parts.get(f"{layer}.attn_{part}.weight") for part in "qkv"]
        if all(part is not None for part in three):
            fused.pop(name)
            fused[f"{layer}.attn_qkv.weight"] = torch.cat(three)  # type: ignore[arg-type]
        else:
            fused[f"{layer}.attn_q.weight"] = parts[f"{layer}.attn_q.weight"]
    read = read_checkpoint(write_gguf(tmp_path / "fused.gguf", metadata, fused))
    found = decoder_logits(load_model(read, SdpaBackend()), [tuple(range(1, 20))])
    assert torch.equal(found, expected) and any("attn_qkv" in name for name in fused)


def _entry(kind: str, key: str) -> tuple[str, Any]:
    found, value = conversions()[kind]["metadata"][key]
    return found, value


@pytest.mark.parametrize("name", MIXED)
def test_c_and_torch_answer_alike(name: str, tmp_path: Path) -> None:
    """C multiplies the stored integers with activations of 8 bits; torch dequantises them."""
    checkpoint = read_checkpoint(quantised(tmp_path, MIXED[name]))
    outputs: list[Tensor] = []
    for backend in native_backends():
        models = (load_model(checkpoint, SdpaBackend()), load_native(checkpoint, backend.library))
        outputs += [decoder_logits(model, [tuple(range(1, 40))]) for model in models]
        difference = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
        assert 0 < difference < 0.03


@pytest.mark.parametrize("name", ["k", "q5"])
def test_ranks_read_their_parts(name: str, tmp_path: Path) -> None:
    """Ranks split rows between heads, and columns between two groups."""
    checkpoint, prompts = read_checkpoint(quantised(tmp_path, MIXED[name])), [tuple(range(1, 30))]

    def logits(group: Any) -> Tensor:
        return decoder_logits(load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group)), prompts)

    with torch.inference_mode():
        alone = decoder_logits(load_model(checkpoint, SdpaBackend()), prompts)
        for together in on_ranks(2, logits):
            assert torch.allclose(together, alone, atol=1e-4 * float(alone.abs().max()))


def test_a_file_generates_as_its_folder(tmp_path: Path, packed_here: None) -> None:
    """Compare the embedded `code` in float32 as a file, and as a folder with tokenizer.json."""
    folder = Path(embedded_models()["code"])
    raw, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors = {gguf_name(name): in_turns(name, one, raw) for name, one in stored.items()}
    file = write_gguf(tmp_path / "code.gguf", llama_metadata(raw), tensors)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    params, engine = SamplingParams(max_tokens=12, temperature=0.0), EngineConfig(device="cpu", dtype="float32")
    texts = []
    for path in (folder, tmp_path, file):
        llm = LLM(path, engine)
        prompt = [0, 17, 300, 45] if llm.tokenizer is None else "def add(a, b):"
        texts.append(llm.generate([prompt], params)[0])
        assert llm.checkpoint.config.eos_token_ids == (0,) and llm.checkpoint.path == path
        llm.close()
    assert texts[0] == texts[1] != "" and texts[2] == ""  # a file named alone uses its own tokenizer, and has none here


def llama_metadata(raw: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    keys = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    return {
        "general.architecture": ("STRING", "llama"),
        "llama.attention.layer_norm_rms_epsilon": ("FLOAT32", raw["rms_norm_eps"]),
        **{f"llama.{key}": ("UINT32", raw[name]) for key, name in keys.items()},
        "tokenizer.ggml.model": ("STRING", "none"),
        "tokenizer.ggml.bos_token_id": ("UINT32", 0),
        "tokenizer.ggml.eos_token_id": ("UINT32", 0),
    }


def gguf_name(name: str) -> str:
    """Return a tensor's GGUF name, as llama.cpp's converter names it in a tiny Llama."""
    layer = next((part for part in name.split(".") if part.isdecimal()), "")
    pattern = f"model.{name.removeprefix('model.')}".replace(f".{layer}.", ".{}.") if layer else f"model.{name}"
    known = conversions()["llama"]["tensors"]
    return next(ours.replace("{}", layer) for ours, theirs in known.items() if theirs[0] == pattern)


def in_turns(name: str, tensor: Tensor, raw: dict[str, Any]) -> Tensor:
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}.get(name.split(".")[-2])
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def test_packed_weights_are_found_again(tmp_path: Path) -> None:
    """Weights of the same file are mapped; weights of a file with other numbers are packed again."""
    path = quantised(tmp_path, MIXED["k"])

    def outcome() -> str:
        weights = PackedWeights(
            WeightsCache(tmp_path / "cache"), read_checkpoint(path), SdpaBackend(), native_formats(path)
        )
        weights.load()
        return weights.outcome

    for _ in native_backends():
        assert (outcome(), outcome()) == ("written", "mapped")
        path.rename(tmp_path / "moved.gguf")
        path = tmp_path / "moved.gguf"
        assert outcome() == "mapped"
        data = bytearray(path.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
        assert outcome() == "written"


def native_formats(path: Path) -> LinearFactory:
    return native_linears(read_checkpoint(path).config, torch.float32, native_backends()[0].library)


def test_files_in_a_folder_of_models_are_found(tmp_path: Path) -> None:
    converted("llama", tmp_path)
    folder = tmp_path / "in-a-folder"
    folder.mkdir()
    converted("qwen2", folder)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    found = ModelsFolder(str(tmp_path)).scan()
    assert found is not None and list(found) == ["broken", "in-a-folder", "llama"]
    assert found["llama"].path == tmp_path / "llama.gguf" and found["llama"].checkpoint is not None
    assert found["in-a-folder"].checkpoint is not None and "only 4 bytes" in found["broken"].reason
    assert ModelsFolder(str(tmp_path)).below("llama.gguf") == tmp_path / "llama.gguf"
