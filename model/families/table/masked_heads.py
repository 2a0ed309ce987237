"""Masked-language-model heads: what each family calls their tensors, and whether a checkpoint has one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config.layer import Activation, NormConfig
from model.config.model import EmbeddingConfig, MaskedHeadConfig, ModelConfig
from model.families.table.helpers import affine
from model.families.table.rules import LinearRule, Rule, TensorRule


@dataclass(frozen=True, slots=True)
class MaskedHeadTable:
    """What the tensors of a family's head are called. The output's matrix is the token table unless it is untied.

    A family whose head is the output alone has no names of the rest.
    """

    dense: str
    norm: str
    out: str
    bias: str  # of the output, which may be called `out`.bias too

    def needed(self, *, tied: bool) -> set[str]:
        """The tensors without which there is no head; empty if they do not tell."""
        if not self.dense:
            return set() if tied else {f"{self.out}.weight"}
        out = {self.bias} if tied else {self.bias, f"{self.out}.weight"}
        return {f"{self.dense}.weight", f"{self.norm}.weight"} | out

    def is_part_of(self, names: Collection[str]) -> bool:
        """Whether any tensor of the head is among these."""
        stems = tuple(f"{stem}." for stem in (self.dense, self.norm, self.out) if stem)
        return self.bias in names or any(name.startswith(stems) for name in names)


_BERT = MaskedHeadTable(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_ROBERTA = MaskedHeadTable("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
MASKED_HEADS: dict[str, MaskedHeadTable] = {
    "albert": MaskedHeadTable("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
    "bert": _BERT,
    "distilbert": MaskedHeadTable("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    "electra": MaskedHeadTable(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        "generator_lm_head.bias",
    ),
    "deberta": _BERT,
    "deberta-v2": _BERT,
    "nomic_bert": replace(_BERT, norm="cls.predictions.transform.layer_norm"),
    **dict.fromkeys(("gte", "new"), replace(_ROBERTA, norm="lm_head.norm", bias="lm_head.decoder.bias")),
    "eurobert": MaskedHeadTable("", "", "lm_head", ""),
    "modernbert": MaskedHeadTable("head.dense", "head.norm", "decoder", "decoder.bias"),
    **dict.fromkeys(("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet", "jina_embeddings_v3"), _ROBERTA),
    **dict.fromkeys(("data2vec-text", "esm", "roberta-prelayernorm"), _ROBERTA),
    **dict.fromkeys(("ernie", "megatron-bert"), _BERT),
    "rembert": MaskedHeadTable(
        "cls.predictions.dense",
        "cls.predictions.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.decoder.bias",
    ),
}


def masked_head(
    raw: Mapping[str, Any],
    names: Collection[str] | None,
    embedding: EmbeddingConfig,
    activation: Activation | None,
    norm: NormConfig | None,
    *,
    dense_bias: bool = True,
) -> MaskedHeadConfig | None:
    """Return the head if the checkpoint stores one, or if its tensors are not known but `architectures` names one.

    Of a model that should have a head, a part is enough: what is missing is then an error when the weights are loaded.
    An output's matrix that is stored as well as the token table is its own, whatever the settings say.
    """
    table = MASKED_HEADS[raw["model_type"]]
    architecture = (raw.get("architectures") or [""])[0] or ""
    tied = raw.get("tie_word_embeddings", True) is not False and f"{table.out}.weight" not in (names or ())
    needed = table.needed(tied=tied)
    named = architecture.endswith("ForMaskedLM")
    if not named and (names is None or not needed):
        return None
    if names is not None and not needed <= set(names) and not (named and table.is_part_of(names)):
        return None
    bare = not table.dense
    return MaskedHeadConfig(embedding.embedding_size, activation, norm, tied, dense_bias, bias=not bare)


def masked_head_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the weight rules of the head, if any; what is stored of a tied matrix is passed over."""
    if config.masked_head is None:
        return
    table = MASKED_HEADS[config.model_type]
    head = config.masked_head
    if head.activation is not None:
        yield LinearRule(table.dense, "masked_head.dense", bias=head.dense_bias)
    if head.norm is not None:
        yield from affine(table.norm, "masked_head.norm", bias=head.norm.bias)
    if not head.tied:
        yield LinearRule(table.out, "masked_head.out", bias=False)
    if head.bias:
        yield TensorRule(table.bias, "masked_head.out.bias")


def tied_names(model_type: str) -> dict[str, Any]:
    """Return the fields of a `Family` that say what the tensors of its head are called too."""
    table = MASKED_HEADS[model_type]
    aliases = {} if table.bias in ("", f"{table.out}.bias") else {f"{table.out}.bias": table.bias}
    return {"heads": (f"{table.out}.weight",), "aliases": aliases}
