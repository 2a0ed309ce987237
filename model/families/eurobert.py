"""EuroBERT: Llama's network, whose attention sees both directions (Boizard et al. 2025)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.model import ClassifierInput, ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import as_encoder, encoder_rules
from triptych.model.families.table.heads import masked_head, masked_head_rules, pooled_by
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule

_POOLING = {"bos": ClassifierInput.FIRST, "mean": ClassifierInput.MEAN, "late": ClassifierInput.ALL}


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in ("bos_token", "eos_token", "pad_token", "mask_token"):  # their ids are what counts
        raw.get(unused)
    base = as_encoder(llama.config(raw.otherwise(max_position_embeddings=8192, rms_norm_eps=1e-5), names))
    raw = raw.otherwise(classifier_pooling=raw.get("clf_pooling", "late"))
    raw.get("classifier_pooling")
    untied = raw.otherwise(tie_word_embeddings=False)
    return replace(
        base,
        classifier=base.classifier and pooled_by(base.classifier, raw, _POOLING, "late"),
        masked_head=masked_head(untied, names, base.embedding, None, None),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from encoder_rules(llama.rules)(config)
    yield from masked_head_rules(config)


FAMILIES = {"eurobert": Family(config, rules, "model.", llama.DROPPED)}
