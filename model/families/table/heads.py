"""Heads over a network: classifiers and masked-language-model heads, and what each family calls their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triptych.model.config.attention import NormConfig
from triptych.model.config.layer import Activation
from triptych.model.config.model import (
    ClassifierConfig,
    ClassifierInput,
    EmbeddingConfig,
    MaskedHeadConfig,
    ModelConfig,
)
from triptych.model.errors import ConfigError
from triptych.model.families.table.helpers import affine
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import ClassifierTable, LinearRule, Rule, TensorRule

_LIKE_ROBERTA = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet", "jina_embeddings_v3")

# -- Classification heads: which token each family's head reads, its layers, and its tensors' names.

_MAX_LABELS = 1_000_000  # a larger number is an error in the file
_FIRST, _LAST, _POOLER = ClassifierInput.FIRST, ClassifierInput.LAST, ClassifierInput.POOLER
_ROBERTA_CLASSIFIER = ClassifierTable("classifier.out_proj", _FIRST, "classifier.dense", Activation.TANH)
_DEBERTA = ClassifierTable("classifier", _FIRST, "pooler.dense", Activation.GELU)
_BART = ClassifierTable(
    "classification_head.out_proj", ClassifierInput.EOS, "classification_head.dense", Activation.TANH
)
_WRAPPING = replace(_BART, wraps=True)
_DECODER = ClassifierTable("score", ClassifierInput.LAST_UNPADDED, bias=False)

# Decoders whose heads for tokens are called `score` too.
_SCORING = (
    *("llama", "mistral", "ministral", "ministral3", "mistral3", "qwen2", "qwen3", "phi3", "gemma", "gemma2"),
    *("gemma3_text", "gemma3", "mixtral", "minimax_m2", "qwen2_moe", "qwen3_moe", "gpt_oss", "seed_oss", "arcee"),
    *("nemotron", "glm", "glm4", "helium", "olmo", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus", "phimoe"),
    *("smollm3", "olmo2", "olmo3", "exaone4", "stablelm", "starcoder2", "phi"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5"),
)

_MODERNBERT = ClassifierTable("classifier", _FIRST, "head.dense", Activation.GELU, norm="head.norm")

_BERT_LIKE = ("ernie", "megatron-bert", "rembert")
# Heads with one result for a text. Heads for tokens are called `classifier`, but for `_SCORING` and `_TOKENS`.
_SEQUENCE: dict[str, ClassifierTable] = {
    "albert": ClassifierTable("classifier", _POOLER),
    "bart": _BART,
    **dict.fromkeys(("bert", "nomic_bert", "gte", "new", *_BERT_LIKE), ClassifierTable("classifier", _POOLER)),
    "eurobert": ClassifierTable("classifier", ClassifierInput.ALL, "dense", Activation.GELU),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "distilbert": ClassifierTable("classifier", _FIRST, "pre_classifier", Activation.RELU),
    "electra": ClassifierTable("classifier.out_proj", _FIRST, "classifier.dense", Activation.GELU),
    **dict.fromkeys(_LIKE_ROBERTA, _ROBERTA_CLASSIFIER),
    **dict.fromkeys(("data2vec-text", "esm", "roberta-prelayernorm"), _ROBERTA_CLASSIFIER),
    "mvp": _BART,
    **dict.fromkeys(("mbart", "plbart"), _WRAPPING),
    "xlnet": ClassifierTable("logits_proj", _LAST, "sequence_summary.summary", Activation.TANH),
    **dict.fromkeys(("vit", "deit"), ClassifierTable("classifier", _FIRST)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), ClassifierTable("classifier", ClassifierInput.FIRST_AND_MEAN)),
    "modernbert": _MODERNBERT,
    **dict.fromkeys(
        ("gpt2", "gpt_neo", "gpt_bigcode", "gpt_neox", "gptj", "falcon", "bloom", "mpt", "opt", *_SCORING), _DECODER
    ),
}
_TOKENS: dict[str, ClassifierTable] = {"modernbert": replace(_MODERNBERT, input=ClassifierInput.EVERY)}


# Families whose heads for the first and last tokens of an answer read the encoder, and are called `qa_outputs`.
_ANSWERING = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet"),
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "data2vec-text", "roberta-prelayernorm", *_BERT_LIKE),
)
_ENDS = ("start", "end")
_RELEVANT = ("relevance",)


def _head(model_type: str, *, per_token: bool, spans: bool = False) -> ClassifierTable | None:
    if spans:
        answering = ClassifierTable("qa_outputs", ClassifierInput.EVERY) if model_type in _ANSWERING else None
        return _TOKENS.get(model_type, answering)
    if not per_token:
        return _SEQUENCE.get(model_type)
    if model_type in _TOKENS:
        return _TOKENS[model_type]
    return ClassifierTable("score" if model_type in _SCORING else "classifier", ClassifierInput.EVERY)


def classifier(raw: Settings, names: Collection[str] | None) -> ClassifierConfig | None:
    """Return the classification head that `architectures` names; None if the model has none. Raises `ConfigError`."""
    architecture = (raw.get("architectures") or [""])[0] or ""
    spans = architecture.endswith("ForQuestionAnswering")
    per_token = spans or architecture.endswith("ForTokenClassification")
    if not per_token and not architecture.endswith(("ForSequenceClassification", "ForImageClassification")):
        return None
    head = _head(raw["model_type"], per_token=per_token, spans=spans)
    if head is None:
        raise ConfigError(f"{architecture} is not served")
    bias = head.bias if names is None else f"{head.out}.bias" in names
    labels = _ENDS if spans else _labels(raw)
    return ClassifierConfig(
        labels,
        head.input,
        head.activation,
        bias,
        _activation(raw, labels),
        spans=spans,
        wraps=head.wraps,
        entailment=None if per_token else _entailment(raw, labels),
    )


def _entailment(raw: Settings, labels: Sequence[str]) -> int | None:
    """Return the first label whose name begins so, by label2id, as the pipeline of `transformers`; else by id2label."""
    places = raw.get("label2id") if _names(raw) else None
    named = places.items() if isinstance(places, Mapping) else ()
    by_name = [*named, *((name, place) for place, name in enumerate(labels))]
    found = (place for name, place in by_name if name.lower().startswith("entail"))
    return next((place for place in found if type(place) is int and 0 <= place < len(labels)), None)


def _activation(raw: Settings, labels: Sequence[str]) -> str:
    """Return what makes scores of logits, as the pipelines of `transformers` choose it."""
    problem = raw.get("problem_type")
    if problem == "regression":
        return "Identity"
    return "Sigmoid" if problem == "multi_label_classification" or len(labels) == 1 else "Softmax"


def pooled_by(
    head: ClassifierConfig, raw: Settings, kinds: Mapping[str, ClassifierInput], default: str
) -> ClassifierConfig:
    """Return the head of a text with the input that `classifier_pooling` names. Raises `ConfigError`."""
    name = raw.get("classifier_pooling", default)
    if name not in kinds:
        raise ConfigError(f"classifier_pooling {name!r} is not served; served are {', '.join(kinds)}")
    return head if head.per_token else replace(head, input=kinds[name])


def has_pooler(head: ClassifierConfig | None, names: Collection[str] | None, weight: str) -> bool:
    """Return whether the model has a pooler, by its tensors if known, else by whether the head reads one."""
    if names is not None:
        return weight in names
    return head is None or head.input is ClassifierInput.POOLER


def _names(raw: Settings) -> Mapping[str, Any]:
    """Return the names of labels by ids; none where `num_labels` is another number, which holds in `transformers`."""
    names: Mapping[str, Any] = raw.get("id2label") or {}
    return names if raw.get("num_labels") in (None, len(names)) else {}


def _labels(raw: Settings) -> tuple[str, ...]:
    """Return the label names in the order of ids; without names `num_labels`, by default as many as the class has."""
    names = _names(raw)
    if names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    count = raw.get("num_labels", 3 if raw["model_type"] == "bart" else 2)
    if not 0 < count <= _MAX_LABELS:
        raise ConfigError(f"num_labels must be from 1 to {_MAX_LABELS}, found {count}")
    return tuple(f"LABEL_{i}" for i in range(count))


def token_classifier(config: ModelConfig, tokens: tuple[int, ...]) -> ModelConfig:
    """Return a language model as a classifier of one label, whose score is in the logits of some tokens.

    Raises `ConfigError` where that cannot be served.
    """
    head = config.head
    plain = head is not None and head.softcap is None and head.scale == 1.0 and not head.bias
    if config.model_type not in _SCORING or head is None or not plain:
        raise ConfigError(f"scores by the logits of tokens are not served for {config.model_type!r}")
    outside = [token for token in tokens if not 0 <= token < config.embedding.vocab_size]
    if outside:
        raise ConfigError(f"tokens {outside} are outside the vocabulary")
    labels = ClassifierConfig(_RELEVANT, _LAST, bias=False, activation="Sigmoid", tokens=tokens, tied=head.tied)
    return replace(config, head=None, classifier=labels)


def _token_rules(config: ModelConfig, labels: ClassifierConfig) -> Iterator[Rule]:
    """Yield the rules of the rows of the vocabulary's matrix that belong to the tokens."""
    hidden_size = next(iter(config.stacks.values())).output_width
    shape = (config.embedding.vocab_size, hidden_size)
    source = "embed_tokens.weight" if labels.tied else "lm_head.weight"
    for place, token in enumerate(labels.tokens):
        rows, part = (place, place + 1), (token, token + 1)
        yield TensorRule(source, "classifier.out.weight", rows, shape=shape, part=part)


def classifier_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield the weight rules of the classification head, if any."""
    if config.classifier is None:
        return
    if config.classifier.tokens:
        yield from _token_rules(config, config.classifier)
        return
    head = _head(config.model_type, per_token=config.classifier.per_token, spans=config.classifier.spans)
    assert head is not None
    if config.classifier.dense is not None:
        yield LinearRule(head.dense, "classifier.dense", bias=config.classifier.dense_bias)
    if config.classifier.norm is not None:
        yield from affine(head.norm, "classifier.norm", bias=config.classifier.norm.bias)
    yield LinearRule(head.out, "classifier.out", bias=config.classifier.bias)


# -- Masked-language-model heads: what each family calls their tensors, and whether a checkpoint has one.


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
        """Return the tensors that a head must have; empty if their absence tells nothing."""
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
_ROBERTA_HEAD = MaskedHeadTable("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
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
    **dict.fromkeys(("gte", "new"), replace(_ROBERTA_HEAD, norm="lm_head.norm", bias="lm_head.decoder.bias")),
    "eurobert": MaskedHeadTable("", "", "lm_head", ""),
    "modernbert": MaskedHeadTable("head.dense", "head.norm", "decoder", "decoder.bias"),
    **dict.fromkeys(_LIKE_ROBERTA, _ROBERTA_HEAD),
    **dict.fromkeys(("data2vec-text", "esm", "roberta-prelayernorm"), _ROBERTA_HEAD),
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
