"""The table of outputs: what each needs of a model, and which fields of a body it reads."""

from __future__ import annotations

from dataclasses import replace

from triptych.model.api.request import EncodeTask
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.planning.outputs import answers, vectors
from triptych.service.planning.outputs.base import Need, OutputKind
from triptych.service.schemas.encode_bodies import EncodeBody


def _classifies_tokens(served: ServedModel) -> bool:
    head = served.config.classifier
    return head is not None and head.per_token and not head.spans


_CLASSIFIER = Need("has no classifier", lambda served: served.config.classifier is not None)
_LABELS = Need(
    "has no classifier of texts or tokens",
    lambda served: served.config.classifier is not None and not served.config.classifier.spans,
)
_TOKEN_CLASSIFIER = Need("has no classifier of tokens", _classifies_tokens)
_SPANS = Need(
    "has no head for answers", lambda served: served.config.classifier is not None and served.config.classifier.spans
)
_ENTAILMENT = Need(
    "has no classifier with a label of entailment", lambda served: answers.entailment_label(served) is not None
)
_MASKED_HEAD = Need("has no masked-language-model head", lambda served: served.config.masked_head is not None)
_SPARSE = Need(
    "has no masked-language-model head and no weights of tokens",
    lambda served: served.config.masked_head is not None or served.checkpoint.sentences.token_weight is not None,
)
_LATE = Need("has no projection of tokens", lambda served: served.checkpoint.sentences.late is not None)
_TOKENIZER = Need("has no tokenizer", lambda served: served.tokenizer is not None, of_tokenizer=True)
_MASK = Need(
    "has no mask token",
    lambda served: served.tokenizer is not None and served.tokenizer.mask_id is not None,
    of_tokenizer=True,
)
_OFFSETS = Need(
    "has a tokenizer that cannot tell where tokens are in a text",
    lambda served: served.tokenizer is not None and served.tokenizer.has_offsets,
    of_tokenizer=True,
)
_VECTOR = frozenset({"prompt_name", "task", "truncate", "normalize", "encoding_format"})

_TABLE = (
    OutputKind(
        "embedding",
        EncodeTask.EMBEDDING,
        vectors.embedding_item,
        fields=_VECTOR | {"pooling", "dimensions", "embedding_type", "ranges", "chunks", "split", "stride"},
        readings=vectors.divided_text,
        settings=vectors.embedding_settings,
    ),
    OutputKind("tokens", EncodeTask.TOKENS, vectors.tokens_item, fields=_VECTOR, detailed=True),
    OutputKind(
        "logits",
        EncodeTask.LOGITS,
        vectors.scores_item,
        needs=(_CLASSIFIER,),
        fields=frozenset({"truncate", "encoding_format"}),
        labelled=True,
        settings=vectors.end_of_sequence,
    ),
    OutputKind(
        "scores",
        EncodeTask.SCORES,
        vectors.scores_item,
        needs=(_LABELS,),
        fields=frozenset({"truncate", "encoding_format"}),
        labelled=True,
        settings=vectors.end_of_sequence,
    ),
    OutputKind(
        "sparse",
        EncodeTask.SPARSE,
        vectors.sparse_item,
        needs=(_SPARSE,),
        fields=frozenset({"truncate", "prompt_name", "top_k"}),
        detailed=True,
        settings=vectors.sparse_settings,
    ),
    OutputKind(
        "multi_vector",
        EncodeTask.MULTI_VECTOR,
        vectors.vectors_item,
        needs=(_LATE, _TOKENIZER),
        fields=frozenset({"truncate", "encoding_format", "input_type"}),
        detailed=True,
        room=vectors.room,
        as_read=vectors.as_read,
        readings=vectors.single_text,
        settings=vectors.vector_settings,
    ),
    OutputKind(
        "fill_mask",
        EncodeTask.FILL_MASK,
        answers.mask_item,
        needs=(_MASKED_HEAD, _TOKENIZER, _MASK),
        fields=frozenset({"top_k", "targets"}),
        detailed=True,
        verbatim=True,
        heavy=True,
        settings=answers.mask_settings,
    ),
    OutputKind(
        "token_classification",
        EncodeTask.LOGITS,
        answers.entities_item,
        needs=(_TOKEN_CLASSIFIER, _TOKENIZER, _OFFSETS),
        fields=frozenset({"aggregation", "ignore_labels", "stride"}),
        detailed=True,
        offsets=True,
        windows=True,
        verbatim=True,
        heavy=True,
    ),
    OutputKind(
        "question_answering",
        EncodeTask.LOGITS,
        answers.answers_item,
        needs=(_SPANS, _TOKENIZER, _OFFSETS),
        fields=frozenset({"top_k", "max_answer_length", "no_answer", "align_to_words", "stride"}),
        detailed=True,
        offsets=True,
        windows=True,
        verbatim=True,
        heavy=True,
        room=answers.window,
        readings=answers.question,
        settings=answers.answer_settings,
    ),
    OutputKind(
        "zero_shot",
        EncodeTask.LOGITS,
        answers.zero_shot_item,
        needs=(_ENTAILMENT, _TOKENIZER),
        fields=frozenset({"truncate", "labels", "hypothesis_template", "multi_label"}),
        readings=answers.hypotheses,
    ),
)
OUTPUTS: dict[str, OutputKind] = {output.name: output for output in _TABLE}
_OF_WHOLE_TEXTS = frozenset({"chunks", "split", "stride"})  # their vectors are not made of parts
# The outputs of models with vectors for texts and images, where they differ.
_JOINT = {
    "embedding": replace(OUTPUTS["embedding"], fields=OUTPUTS["embedding"].fields - _OF_WHOLE_TEXTS),
    "zero_shot": OutputKind(
        "zero_shot",
        EncodeTask.EMBEDDING,
        answers.image_labels_item,
        needs=(_TOKENIZER,),
        fields=frozenset({"truncate", "labels", "hypothesis_template"}),
        verbatim=True,
        shared=answers.image_labels,
    ),
}


def _meaningless(output: OutputKind) -> list[tuple[str, object]]:
    """Return the fields that only other outputs read, with their defaults, in the order of the body."""
    return [
        (name, field.default)
        for name, field in EncodeBody.model_fields.items()
        if name not in output.fields and any(name in other.fields for other in _TABLE)
    ]


_MEANINGLESS = {id(output): _meaningless(output) for output in (*_TABLE, *_JOINT.values())}


def kind_of(name: str, served: ServedModel) -> OutputKind:
    """Return the output of this name as the model computes it."""
    return _JOINT.get(name, OUTPUTS[name]) if served.config.joint is not None else OUTPUTS[name]


def missing(output: OutputKind, served: ServedModel) -> str | None:
    """Return what a model lacks for an output; None if it lacks nothing, or that is not known before it is loaded."""
    output = kind_of(output.name, served)
    needs = [need for need in output.needs if served.loaded or not need.of_tokenizer]
    return next((need.lacks for need in needs if not need.met(served)), None)


def output_of(body: EncodeBody, served: ServedModel) -> OutputKind:
    """Return the body's output; raises a 400 if the model cannot compute it, or for a field that it does not read."""
    output = kind_of(body.output, served)
    for name, default in _MEANINGLESS[id(output)]:
        if getattr(body, name) != default:
            raise invalid(f"{name} has no meaning with output '{output.name}'{_of(served)}", name)
    lacks = missing(output, served)
    if lacks is not None:
        raise invalid(f"output: model {served.name} {lacks}", "output")
    return output


def _of(served: ServedModel) -> str:
    return "" if served.config.joint is None else f" of model {served.name}"


def available(served: ServedModel) -> list[str]:
    """Return the names of the outputs that a model can compute."""
    return [output.name for output in _TABLE if missing(output, served) is None]
