"""Whisper: the encoder reads the log-mel spectrogram of a window of sound (Radford et al. 2022).

Two convolutions halve the frames; positions of the encoder are sinusoids that checkpoints store. Both stacks are
pre-norm, keys have no bias, and the distilled models have fewer layers in the decoder than in the encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig
from triptych.model.config.model import AudioConfig, EmbeddingConfig, HeadConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families import bart
from triptych.model.families.table.helpers import affine, ids, ignore_unless, refuse_unless, tied
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule, ZeroRule

# Keys of training, of sound classifiers, and of generation: a request says what its decoder begins with.
_OTHERS = (
    *("apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob"),
    *("mask_feature_length", "mask_feature_min_masks", "use_weighted_layer_sum", "classifier_proj_size"),
    *("median_filter_width", "forced_decoder_ids", "num_hidden_layers"),
)


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, activation_function="gelu")
    ignore_unless(raw, scale_embedding=False)
    for name in _OTHERS:
        raw.get(name)
    audio = AudioConfig(raw.get("num_mel_bins", 80), raw.get("max_source_positions", 1500))
    positions = raw.get("max_target_positions", 448)
    return ModelConfig(
        model_type="whisper",
        embedding=EmbeddingConfig(raw["vocab_size"], raw["d_model"]),
        encoder=_stack(raw, "encoder", audio.num_positions),
        decoder=_stack(raw, "decoder", positions),
        head=HeadConfig(tied=tied(raw, names, "proj_out.weight")),
        audio=audio,
        max_positions=positions,
        bos_token_id=raw.get("bos_token_id", 50256),
        eos_token_ids=ids(raw.get("eos_token_id", 50256)),
        pad_token_id=raw.get("pad_token_id", 50256),
        decoder_start_token_id=raw.get("decoder_start_token_id", 50257),
    )


def _stack(raw: Settings, side: str, positions: int) -> StackConfig:
    learned = PositionConfig(PositionKind.LEARNED, max_positions=positions)
    return bart.stack(raw, side, learned, pre_norm=True, embed_norm=False)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.audio is not None and config.head is not None
    size = config.embedding.embedding_size
    yield TensorRule("decoder.embed_tokens.weight", "tokens.weight")
    for name, inputs in (("conv1", config.audio.num_mel_bins), ("conv2", size)):
        yield TensorRule(f"encoder.{name}.weight", f"audio.{name}.weight", shape=(size, inputs, 3))
        yield TensorRule(f"encoder.{name}.bias", f"audio.{name}.bias")
    for side, stack in config.stacks.items():
        yield TensorRule(f"{side}.embed_positions.weight", f"{side}.positions.weight")
        for i, layer in enumerate(stack.layers):
            here = there = f"{side}.layers.{i}"
            yield from _attention(layer.attention, f"{here}.self_attn", f"{there}.attn", ("q", "k", "v"), "qkv")
            yield from affine(f"{here}.self_attn_layer_norm", f"{there}.attn_norms.pre")
            if layer.cross is not None:
                yield from _attention(layer.cross, f"{here}.encoder_attn", f"{there}.cross", ("q",), "q")
                yield from _attention(layer.cross, f"{here}.encoder_attn", f"{there}.cross", ("k", "v"), "kv")
                yield LinearRule(f"{here}.encoder_attn.out_proj", f"{there}.cross.out")
                yield from affine(f"{here}.encoder_attn_layer_norm", f"{there}.cross_norms.pre")
            yield LinearRule(f"{here}.self_attn.out_proj", f"{there}.attn.out")
            yield LinearRule(f"{here}.fc1", f"{there}.mlp.up")
            yield LinearRule(f"{here}.fc2", f"{there}.mlp.down")
            yield from affine(f"{here}.final_layer_norm", f"{there}.mlp_norms.pre")
        yield from affine(f"{side}.layer_norm", f"{side}.final_norm")
    if not config.head.tied:
        yield LinearRule("proj_out", "head", bias=False)


def _attention(
    config: AttentionConfig, source: str, target: str, parts: tuple[str, ...], fused: str
) -> Iterator[LinearRule | ZeroRule]:
    """Yield the rules of projections that are fused by rows; that of the keys has no bias."""
    size = config.query_size
    for place, part in enumerate(parts):
        rows = (place * size, (place + 1) * size)
        yield LinearRule(f"{source}.{part}_proj", f"{target}.{fused}", part != "k", rows=rows)
        if part == "k":
            yield ZeroRule(f"{target}.{fused}.bias", rows)


_TABLES = ("decoder.embed_tokens.weight",)
FAMILIES = {"whisper": Family(config, rules, "model.", tables=_TABLES, heads=("proj_out.weight",))}
