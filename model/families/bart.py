"""The encoder-decoder of 2017 (Vaswani et al.) and its variants with other norms and positions.

Marian (Junczys-Dowmunt et al. 2018) is the original: sinusoidal positions, post-norm. BART (Lewis et al. 2020) has
learned positions and an embedding norm; MVP (Tang et al. 2022) and PLBART (Ahmad et al. 2021) are BARTs. mBART, M2M-100
(and NLLB), Pegasus and Blenderbot are pre-norm, with a final norm. The small Blenderbot is BART again, but that its
decoder adds positions after the norm of embeddings.

`transformer` is torch.nn.Transformer: config.json has the arguments of `nn.Transformer` by their names, `vocab_size`,
`scale_embedding` and the special ids. The tensors are the module's state_dict under `transformer.`, and
`embedding.weight`, `generator.weight` and `generator.bias`; without `generator.weight` the head is tied. Positions are
the paper's sinusoids, sine and cosine interleaved; they are computed, not stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, HeadConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.heads import classifier, classifier_rules
from triptych.model.families.table.helpers import (
    activation,
    affine,
    cross_attention,
    ids,
    refuse_unless,
    repeat,
    self_attention,
    split_width,
    tied,
)
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

# The decoder's start token by default.
_START = {"plbart": "bos_token_id", "bart": "eos_token_id", "mbart": "eos_token_id", "m2m_100": "eos_token_id"}


def config(
    raw: Settings,
    names: Collection[str] | None,
    *,
    positions: PositionKind = PositionKind.SINUSOIDAL,
    offset: int = 0,
    inclusive: bool = False,
    pre_norm: bool = False,
    embed_norm: bool = False,
    head_bias: bool = True,
    float16_overflows: bool = False,
) -> ModelConfig:
    """Build the configuration; the keyword arguments' defaults are Marian's."""
    learned = positions is PositionKind.LEARNED
    refuse_unless(
        raw,
        static_position_embeddings=not learned,
        normalize_before=pre_norm,
        normalize_embedding=embed_norm,
        add_final_layer_norm=pre_norm,
        share_encoder_decoder_embeddings=True,
        extra_pos_embeddings=offset if learned else raw.get("extra_pos_embeddings"),
        decoder_vocab_size=raw["vocab_size"],
    )
    raw.get("num_hidden_layers"), raw.get("is_decoder")  # the same as encoder_layers; of both stacks by themselves
    max_positions = raw.get("max_position_embeddings", 1024)
    position = PositionConfig(
        positions, max_positions=max_positions if learned else 0, offset=offset, inclusive=inclusive
    )
    size = raw["d_model"]
    start = raw.get("decoder_start_token_id")
    labels = classifier(raw, names)
    has_bias = head_bias and (names is None or "final_logits_bias" in names)  # bare models do not have it
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], size, scale=size**0.5 if raw.get("scale_embedding") else 1.0),
        encoder=stack(raw, "encoder", position, pre_norm=pre_norm, embed_norm=embed_norm),
        decoder=stack(raw, "decoder", position, pre_norm=pre_norm, embed_norm=embed_norm),
        head=None if labels is not None else HeadConfig(tied=tied(raw, names), bias=has_bias),
        classifier=labels,
        max_positions=max_positions,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
        decoder_start_token_id=raw.get(_START.get(raw["model_type"], "pad_token_id")) if start is None else start,
        float16_overflows=float16_overflows,
    )


def stack(raw: Settings, side: str, position: PositionConfig, *, pre_norm: bool, embed_norm: bool) -> StackConfig:
    """Build the stack of one side, "encoder" or "decoder"."""
    is_decoder = side == "decoder"
    heads = raw[f"{side}_attention_heads"]
    dim = split_width(raw["d_model"], heads)
    attention = AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True)
    norm = NormConfig(NormKind.LAYER, 1e-5)
    norms = Norms(pre=norm) if pre_norm else Norms(post=norm)
    layer = LayerConfig(
        mixer=attention,
        cross=attention if is_decoder else None,
        feed_forward=MLPConfig(raw[f"{side}_ffn_dim"], activation(raw, "activation_function", "gelu")),
        norms=(norms,) * (3 if is_decoder else 2),
    )
    return StackConfig(
        layers=repeat(layer, raw[f"{side}_layers"]),
        hidden_size=raw["d_model"],
        causal=is_decoder,
        position=position,
        embed_norm=norm if embed_norm else None,
        final_norm=norm if pre_norm else None,
    )


def marian(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Marian, whose two sides may have vocabularies of their own."""
    shared, target = raw.get("share_encoder_decoder_embeddings", True), raw.get("decoder_vocab_size")
    model = config(raw.but(share_encoder_decoder_embeddings=True, decoder_vocab_size=None), names)
    if shared:
        return model
    own = replace(model.embedding, vocab_size=target or model.embedding.vocab_size)
    return replace(model, source_embedding=model.embedding, embedding=own)


def m2m_100(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build M2M-100: positions start at the padding id + 1; the sinusoids' longest wavelength is exactly 10000."""
    raw = raw.otherwise(pad_token_id=1, scale_embedding=True, activation_function="relu")
    padding = raw["pad_token_id"]
    model = config(raw, names, offset=padding + 1, inclusive=True, pre_norm=True, head_bias=False)
    position = replace(model.encoder_stack.position, padding=padding)
    return replace(model, encoder=replace(model.encoder_stack, position=position))


def blenderbot(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, layernorm_variant="prelayernorm")
    raw.get("do_blenderbot_90_layernorm")  # where the norm of embeddings is, which no other size has
    raw = raw.otherwise(max_position_embeddings=128, decoder_start_token_id=1)
    return config(raw, names, positions=PositionKind.LEARNED, pre_norm=True)


def blenderbot_small(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, layernorm_variant="xlm", variant="xlm", do_blenderbot_90_layernorm=True, extra_layer_norm=False)
    raw = raw.otherwise(max_position_embeddings=512, decoder_start_token_id=1)
    model = config(raw, names, positions=PositionKind.LEARNED, embed_norm=True)
    return replace(model, decoder=replace(model.decoder_stack, positions_last=True))


def mvp(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build MVP, a BART; vectors that are put before a layer's keys are not served."""
    refuse_unless(raw, use_prompt=False)
    raw.get("prompt_length"), raw.get("prompt_mid_dim")  # of these vectors
    return _LEARNED(raw.otherwise(decoder_start_token_id=2), names)


def plbart(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build PLBART, a BART of programs, whose embeddings are scaled."""
    return _LEARNED(raw.otherwise(scale_embedding=True), names)


def rules(config: ModelConfig) -> Iterator[Rule]:
    # Of two tables, the encoder's has the name of the first that is stored.
    yield TensorRule("shared.weight", "tokens.weight" if config.source_embedding is None else "source_tokens.weight")
    if config.source_embedding is not None:
        yield TensorRule("decoder.embed_tokens.weight", "tokens.weight")
    for side, stack in config.stacks.items():
        if config.source_embedding is None:
            yield TensorRule(f"{side}.embed_tokens.weight", "tokens.weight", duplicate=True)
        if stack.position.kind is PositionKind.LEARNED:
            yield TensorRule(f"{side}.embed_positions.weight", f"{side}.positions.weight")
        if stack.embed_norm:
            yield from affine(f"{side}.layernorm_embedding", f"{side}.embed_norm")
        for i, layer in enumerate(stack.layers):
            here = there = f"{side}.layers.{i}"
            slot = "pre" if layer.norms[0].pre else "post"
            names = (f"{here}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
            yield from self_attention(layer.attention, f"{there}.attn", *names)
            yield from affine(f"{here}.self_attn_layer_norm", f"{there}.attn_norms.{slot}")
            if layer.cross is not None:
                names = (f"{here}.encoder_attn.{part}_proj" for part in ("q", "k", "v", "out"))
                yield from cross_attention(layer.cross, f"{there}.cross", *names)
                yield from affine(f"{here}.encoder_attn_layer_norm", f"{there}.cross_norms.{slot}")
            yield LinearRule(f"{here}.fc1", f"{there}.mlp.up")
            yield LinearRule(f"{here}.fc2", f"{there}.mlp.down")
            yield from affine(f"{here}.final_layer_norm", f"{there}.mlp_norms.{slot}")
        if stack.final_norm:
            yield from affine(f"{side}.layer_norm", f"{side}.final_norm")
    if config.head is not None and config.head.bias:
        yield TensorRule("final_logits_bias", "head.bias", shape=(1, config.embedding.vocab_size))
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)
    yield from classifier_rules(config)


_LEARNED = partial(config, positions=PositionKind.LEARNED, offset=2, embed_norm=True)
_DROPPED = ("encoder.version", "decoder.version")  # of the files before `transformers`
_TABLES = (*_DROPPED, "*.embed_positions.weight", "*.embed_positions.weights")  # sinusoids are computed
_SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_FAMILY = Family(_LEARNED, rules, "model.", _DROPPED, tables=_SHARED)
_COMPUTED = replace(_FAMILY, dropped=_TABLES)


_TORCH_HEAD = "generator.weight"


def torch_module(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, bias=True, batch_first=raw.get("batch_first"))
    size, heads = raw.get("d_model", 512), raw.get("nhead", 8)
    dim = split_width(size, heads)
    attention = AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    norms = Norms(pre=norm) if raw.get("norm_first", False) else Norms(post=norm)

    def side_stack(side: str) -> StackConfig:
        layer = LayerConfig(
            mixer=attention,
            cross=attention if side == "decoder" else None,
            feed_forward=MLPConfig(raw.get("dim_feedforward", 2048), activation(raw, "activation", "relu")),
            norms=(norms,) * (3 if side == "decoder" else 2),
        )
        return StackConfig(
            layers=repeat(layer, raw.get(f"num_{side}_layers", 6)),
            hidden_size=size,
            causal=side == "decoder",
            position=PositionConfig(PositionKind.SINUSOIDAL, interleaved=True),
            final_norm=norm,  # nn.Transformer has final norms with either norm_first
        )

    return ModelConfig(
        model_type="transformer",
        embedding=EmbeddingConfig(
            raw["vocab_size"], size, scale=size**0.5 if raw.get("scale_embedding", True) else 1.0
        ),
        encoder=side_stack("encoder"),
        decoder=side_stack("decoder"),
        head=HeadConfig(tied=tied(raw, names, _TORCH_HEAD), bias=names is None or "generator.bias" in names),
        max_positions=raw.get("max_position_embeddings"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
        decoder_start_token_id=raw.get("decoder_start_token_id", raw.get("bos_token_id")),
    )


def torch_rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.head is not None
    yield TensorRule("embedding.weight", "tokens.weight")
    for side, stack in config.stacks.items():
        for i, layer in enumerate(stack.layers):
            here, there = f"transformer.{side}.layers.{i}", f"{side}.layers.{i}"
            yield from _packed(f"{here}.self_attn.in_proj_", f"{there}.attn.qkv.")
            yield LinearRule(f"{here}.self_attn.out_proj", f"{there}.attn.out")
            sublayers = ["attn", "mlp"]
            if layer.cross is not None:
                sublayers.insert(1, "cross")
                yield from _cross(f"{here}.multihead_attn", f"{there}.cross", stack)
            slot = "pre" if layer.norms[0].pre else "post"
            for number, sublayer in enumerate(sublayers, 1):
                yield from affine(f"{here}.norm{number}", f"{there}.{sublayer}_norms.{slot}")
            yield LinearRule(f"{here}.linear1", f"{there}.mlp.up")
            yield LinearRule(f"{here}.linear2", f"{there}.mlp.down")
        yield from affine(f"transformer.{side}.norm", f"{side}.final_norm")
    if config.head.bias:
        yield TensorRule("generator.bias", "head.bias")
    if not config.head.tied:
        yield TensorRule(_TORCH_HEAD, "head.weight")


def _packed(source: str, target: str) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        yield TensorRule(f"{source}{kind}", f"{target}{kind}")


def _cross(source: str, target: str, stack: StackConfig) -> Iterator[Rule]:
    """Split the stored matrix of q, k and v: q is separate, since it reads another sequence than k and v."""
    size = stack.hidden_size
    for kind, shape in (("weight", (3 * size, size)), ("bias", (3 * size,))):
        yield TensorRule(f"{source}.in_proj_{kind}", f"{target}.q.{kind}", shape=shape, part=(0, size))
        yield TensorRule(f"{source}.in_proj_{kind}", f"{target}.kv.{kind}", shape=shape, part=(size, 3 * size))
    yield LinearRule(f"{source}.out_proj", f"{target}.out")


FAMILIES = {
    "marian": replace(_COMPUTED, config=marian),
    "bart": _FAMILY,
    "mbart": replace(_FAMILY, config=partial(_LEARNED, pre_norm=True)),
    "m2m_100": replace(_COMPUTED, config=m2m_100),
    "mvp": replace(_FAMILY, config=mvp),
    "plbart": replace(_FAMILY, config=plbart),
    "blenderbot": replace(_FAMILY, config=blenderbot),
    "blenderbot-small": replace(_FAMILY, config=blenderbot_small),
    "pegasus": replace(_COMPUTED, config=partial(config, pre_norm=True, float16_overflows=True)),
    "transformer": Family(torch_module, torch_rules, tables=("embedding.weight",), heads=(_TORCH_HEAD,)),
}
