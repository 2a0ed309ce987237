"""T5Gemma: Gemma 2's layers as an encoder, and with cross attention as a decoder (Zhang et al. 2025).

The two may be of different sizes, and each has a token table of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.layer import LayerConfig
from triptych.model.config.model import HeadConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families import gemma
from triptych.model.families.table.decoders import as_encoder, see_one_more
from triptych.model.families.table.helpers import affine, cross_attention, fused, ids, self_attention, tied
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

_HEAD = "lm_head.out_proj.weight"


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    encoder, decoder = (_module(raw, side) for side in ("encoder", "decoder"))
    source, target = encoder.decoder, decoder.decoder
    assert source is not None and target is not None and decoder.head is not None
    raw.get("vocab_size")  # the decoder's
    start = raw.get("decoder_start_token_id")
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=decoder.embedding,
        source_embedding=encoder.embedding,
        encoder=as_encoder(replace(encoder, decoder=source.with_layers(see_one_more))).encoder,
        decoder=target.with_layers(_with_cross),
        head=HeadConfig(tied=tied(raw, names, _HEAD), softcap=decoder.head.softcap),
        max_positions=decoder.max_positions,
        bos_token_id=raw.get("bos_token_id", decoder.bos_token_id),
        eos_token_ids=ids(raw.get("eos_token_id")) or decoder.eos_token_ids,
        pad_token_id=raw.get("pad_token_id", decoder.pad_token_id),
        decoder_start_token_id=decoder.bos_token_id if start is None else start,
    )


def _module(raw: Settings, side: str) -> ModelConfig:
    """Read one side's settings, which are Gemma 2's."""
    own = raw.part(side, raw[side], "t5_gemma_module")
    for unused in ("is_decoder", "cross_attention_hidden_size"):
        own.get(unused)
    found = gemma.gemma2(own, None)
    own.refuse_unread()
    return found


def _with_cross(layer: LayerConfig) -> LayerConfig:
    cross = replace(layer.attention, position=None, window=None)
    return replace(layer, cross=cross, norms=(layer.norms[0], *layer.norms))


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield TensorRule("encoder.embed_tokens.weight", "source_tokens.weight")
    yield TensorRule("decoder.embed_tokens.weight", "tokens.weight")
    for side, stack in config.stacks.items():
        yield from _layers(side, stack)
        yield from affine(f"{side}.norm", f"{side}.final_norm", bias=False)
    if config.head is not None and not config.head.tied:
        yield TensorRule(_HEAD, "head.weight")


def _layers(side: str, stack: StackConfig) -> Iterator[Rule]:
    for i, layer in enumerate(stack.layers):
        here = f"{side}.layers.{i}"
        sublayers = {"self_attn": "attn", "feedforward": "mlp"}
        yield from self_attention(
            layer.attention, f"{here}.attn", *(f"{here}.self_attn.{part}_proj" for part in "qkvo")
        )
        if layer.cross is not None:
            sublayers["cross_attn"] = "cross"
            names = (f"{here}.cross_attn.{part}_proj" for part in "qkvo")
            yield from cross_attention(layer.cross, f"{here}.cross", *names)
        inner = layer.mlp.intermediate_size
        gated = dict.fromkeys((f"{here}.mlp.gate_proj", f"{here}.mlp.up_proj"), inner)
        yield from fused(gated, f"{here}.mlp.up", bias=False)
        yield LinearRule(f"{here}.mlp.down_proj", f"{here}.mlp.down", bias=False)
        for stored, sublayer in sublayers.items():
            yield from affine(f"{here}.pre_{stored}_layernorm", f"{here}.{sublayer}_norms.pre", bias=False)
            yield from affine(f"{here}.post_{stored}_layernorm", f"{here}.{sublayer}_norms.output", bias=False)


FAMILIES = {
    "t5gemma": Family(config, rules, "model.", tables=("decoder.embed_tokens.weight",), heads=(_HEAD,)),
}
