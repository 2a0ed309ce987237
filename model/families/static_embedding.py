"""Embedding bags (StaticEmbedding of sentence-transformers, model2vec): token vectors without a network.

A text's vector is the mean of those of its tokens. Folders have no config.json of it: the sizes are the table's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size = raw["hidden_size"]
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], size),
        encoder=StackConfig((), size, causal=False),
        max_positions=None,
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield TensorRule("embedding.weight", "tokens.weight")


FAMILIES = {"static_embedding": Family(config, rules, tables=("embedding.weight", "embeddings"))}
