"""Encoders that differ from BERT by where a norm is, by the width of embeddings, or by one more vector.

Megatron-BERT (Shoeybi et al. 2019) and RoBERTa-PreLayerNorm are pre-norm. data2vec's text model (Baevski et al.
2022) is a RoBERTa. RemBERT (Chung et al. 2021) has narrow embeddings and a wide output of its own. ERNIE (Sun et al.
2020) adds a vector of its task to every token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import bert
from triptych.model.families.table.heads import tied_names
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule, TensorRule

_MEGATRON_NORMS = {"attention.ln": "attn_norms.pre", "ln": "mlp_norms.pre"}
_PRE_NORMS = {"attention.LayerNorm": "attn_norms.pre", "intermediate.LayerNorm": "mlp_norms.pre"}
_TASKS = "embeddings.task_type_embeddings.weight"


def _pre_norm(base: ModelConfig, *, embed_norm: bool) -> ModelConfig:
    """Return BERT with norms before its sublayers, and a last one."""
    assert base.encoder is not None
    norm = base.encoder.embed_norm
    encoder = base.encoder.with_layers(lambda layer: replace(layer, norms=(Norms(pre=norm),) * 2))
    return replace(base, encoder=replace(encoder, embed_norm=norm if embed_norm else None, final_norm=norm))


def megatron(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    return _pre_norm(bert.config(raw, names), embed_norm=False)


def roberta_pre_norm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    return _pre_norm(bert.roberta(raw, names), embed_norm=True)


def rembert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(tie_word_embeddings=False)
    base, wide = bert.config(raw, names), raw.get("output_embedding_size", 1664)
    head = base.masked_head and replace(base.masked_head, size=wide)
    assert base.encoder is not None
    width, encoder = raw.get("input_embedding_size", 256), replace(base.encoder, project_equal=True)
    embedding = replace(base.embedding, embedding_size=width)
    return replace(base, embedding=embedding, encoder=encoder, masked_head=head)


def ernie(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build ERNIE, of whose tasks a text has the first."""
    base = bert.config(raw, names)
    tasks = raw.get("task_type_vocab_size", 3)
    assert base.encoder is not None
    return replace(base, encoder=replace(base.encoder, tasks=tasks if raw.get("use_task_id", False) else 0))


def _ernie_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.rules(config)
    assert config.encoder is not None
    if config.encoder.tasks:
        shape = (config.encoder.tasks, config.embedding.embedding_size)
        yield TensorRule(_TASKS, "encoder.task", shape=shape, part=(0, 1))


_BERT, _ROBERTA = bert.FAMILIES["bert"], bert.FAMILIES["roberta"]
_IN = "encoder.embedding_hidden_mapping_in"
FAMILIES = {
    "data2vec-text": replace(_ROBERTA, prefix="data2vec_text.", **tied_names("data2vec-text")),
    "megatron-bert": replace(
        _BERT, config=megatron, rules=partial(bert.rules, norms=_MEGATRON_NORMS, final_norm="encoder.ln")
    ),
    "roberta-prelayernorm": replace(
        _ROBERTA,
        config=roberta_pre_norm,
        rules=partial(bert.rules, norms=_PRE_NORMS, final_norm="LayerNorm"),
        prefix="roberta_prelayernorm.",
        **tied_names("roberta-prelayernorm"),
    ),
    "rembert": Family(
        rembert,
        partial(bert.rules, project=_IN),
        "rembert.",
        bert.DROPPED,
        tables=_BERT.tables,
        **tied_names("rembert"),
    ),
    # The vectors of other tasks are left out.
    "ernie": replace(
        _BERT, config=ernie, rules=_ernie_rules, prefix="ernie.", dropped=(*bert.DROPPED, _TASKS), **tied_names("ernie")
    ),
}
