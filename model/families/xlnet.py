"""XLNet as an encoder: scores from relative positions and segments, LayerNorm post-norm (Yang et al. 2019).

Memory of earlier segments and permutations, which belong to its training, are not supported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, XLNetRelativeConfig
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.heads import classifier, classifier_rules
from triptych.model.families.table.helpers import activation, affine, ignore_unless, refuse_unless, repeat
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    if raw.get("clamp_len", -1) > 0:
        refuse_unless(raw, clamp_len=-1)
    refuse_unless(raw, attn_type="bi", bi_data=False)
    ignore_unless(raw, clamp_len=-1, same_length=False)  # without a limit, and of one direction
    labels = classifier(raw, names)
    if labels is not None and not labels.per_token:
        refuse_unless(raw, summary_type="last", summary_use_proj=True, summary_activation="tanh")
    heads, dim = raw["n_head"], raw.get("d_head") or raw["d_model"] // raw["n_head"]
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, position=XLNetRelativeConfig(), query_offset=True),
        feed_forward=MLPConfig(raw["d_inner"], activation(raw, "ff_activation", "gelu")),
        norms=(Norms(post=norm),) * 2,
    )
    encoder = StackConfig(
        layers=repeat(layer, raw["n_layer"]),
        hidden_size=raw["d_model"],
        causal=False,
        token_types=3,  # two texts, and the CLS token
    )
    return ModelConfig(
        model_type="xlnet",
        embedding=EmbeddingConfig(raw["vocab_size"], raw["d_model"]),
        encoder=encoder,
        classifier=labels,
        pad_token_id=raw.get("pad_token_id", 5),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield TensorRule("word_embedding.weight", "tokens.weight")
    for i, layer in enumerate(config.encoder_stack.layers):
        attention = layer.attention
        stored = (config.encoder_stack.hidden_size, attention.num_heads, attention.head_dim)
        here, there = f"layer.{i}.rel_attn", f"encoder.layers.{i}"
        for part, name in enumerate("qkv"):
            rows = (part * attention.query_size, (part + 1) * attention.query_size)
            yield TensorRule(f"{here}.{name}", f"{there}.attn.qkv.weight", rows, transpose=True, shape=stored)
        yield TensorRule(f"{here}.o", f"{there}.attn.out.weight", shape=stored)
        yield TensorRule(f"{here}.r", f"{there}.relative.project.weight", transpose=True, shape=stored)
        yield TensorRule(f"{here}.r_w_bias", f"{there}.attn.offset")
        yield TensorRule(f"{here}.r_r_bias", f"{there}.relative.position_offset")
        yield TensorRule(f"{here}.r_s_bias", f"{there}.relative.segment_offset")
        yield TensorRule(f"{here}.seg_embed", f"{there}.relative.segments")
        yield from affine(f"{here}.layer_norm", f"{there}.attn_norms.post")
        yield LinearRule(f"layer.{i}.ff.layer_1", f"{there}.mlp.up")
        yield LinearRule(f"layer.{i}.ff.layer_2", f"{there}.mlp.down")
        yield from affine(f"layer.{i}.ff.layer_norm", f"{there}.mlp_norms.post")
    yield from classifier_rules(config)


# The mask vector and the language head are for pre-training.
_DROPPED = ("mask_emb", "lm_loss.*")
_TABLES = ("word_embedding.weight",)
FAMILIES = {"xlnet": Family(config, rules, "transformer.", _DROPPED, tables=_TABLES, heads=("lm_loss.weight",))}
