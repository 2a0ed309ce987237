"""MPNet: BERT with T5's bucketed biases of the distance, and learned positions (Song et al. 2020).

All layers share one table of biases. Positions begin after row 1, the padding's; there are no segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import BucketBiasConfig
from triptych.model.config.model import ModelConfig
from triptych.model.families import bert
from triptych.model.families.table.heads import classifier_rules, masked_head_rules, tied_names
from triptych.model.families.table.helpers import affine, refuse_unless, self_attention
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

_PAD = 1  # for the positions, whatever pad_token_id says


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, relative_attention_num_buckets=32)  # `transformers` computes with 32 whatever the file says
    base = bert.roberta(raw.but(type_vocab_size=0, pad_token_id=_PAD), names)
    assert base.encoder is not None
    buckets = BucketBiasConfig(num_buckets=32, max_distance=128)
    encoder = base.encoder.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, position=buckets)))
    return replace(base, encoder=encoder, pad_token_id=raw.get("pad_token_id", _PAD))


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.encoder is not None
    yield TensorRule("embeddings.word_embeddings.weight", "tokens.weight")
    yield TensorRule("embeddings.position_embeddings.weight", "encoder.positions.weight")
    yield from affine("embeddings.LayerNorm", "encoder.embed_norm")
    yield TensorRule("encoder.relative_attention_bias.weight", "encoder.bias.weight")
    for i, layer in enumerate(config.encoder.layers):
        here, there = f"encoder.layer.{i}", f"encoder.layers.{i}"
        names = (f"{here}.attention.attn.{part}" for part in "qkvo")
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.attention.LayerNorm", f"{there}.attn_norms.post")
        yield LinearRule(f"{here}.intermediate.dense", f"{there}.mlp.up")
        yield LinearRule(f"{here}.output.dense", f"{there}.mlp.down")
        yield from affine(f"{here}.output.LayerNorm", f"{there}.mlp_norms.post")
    if config.pooler:
        yield LinearRule("pooler.dense", "pooler")
    yield from classifier_rules(config)
    yield from masked_head_rules(config)


_DROPPED = ("embeddings.position_ids", "lm_head.*")
_TABLES = ("embeddings.word_embeddings.weight",)
FAMILIES = {"mpnet": Family(config, rules, "mpnet.", _DROPPED, tables=_TABLES, **tied_names("mpnet"))}
