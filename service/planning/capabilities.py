"""What each model can do, with one example request for each ability that the model answers.

/info, `triptych inspect`, the banner, /docs and the playground show this list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from triptych.service.core.models import ServedModel
from triptych.service.images.pictures import processing_of
from triptych.service.planning.outputs.registry import available
from triptych.service.planning.translation import languages_to_try
from triptych.service.schemas.types import PIXEL

Json = dict[str, Any]

# Abilities, by the names that /info shows.
CHAT, COMPLETE, TRANSCRIBE, SPEECH_TRANSLATE = "chat", "complete", "transcribe", "translate_speech"
TRANSLATE, SUMMARIZE, REWRITE = "translate", "summarize", "rewrite"
EMBED, RERANK, CLASSIFY, FILL = "embed", "rerank", "classify", "fill"
TAG, ANSWER, ZERO_SHOT, SPARSE, LATE = "tag", "answer", "zero_shot", "embed_sparse", "embed_tokens"
DECIDE, MODERATE = "decide", "moderate"
CLASSIFY_IMAGE, EMBED_IMAGE, LABEL_IMAGE, CHAT_IMAGE = "classify_image", "embed_image", "label_image", "chat_image"
# Abilities that several of these have in common, for the examples of routes.
GENERATE, SEQ2SEQ, JUDGE, TOKENIZE, FILL_MIDDLE = "generate", "seq2seq", "judge", "tokenize", "fill_middle"
MEANINGS = {  # what a model must do, in words
    CHAT: "has a chat template",
    COMPLETE: "continues texts",
    TRANSCRIBE: "transcribes speech",
    SPEECH_TRANSLATE: "translates speech to English",
    TRANSLATE: "translates",
    SUMMARIZE: "summarizes",
    REWRITE: "turns texts into other texts",
    EMBED: "embeds texts",
    RERANK: "ranks documents",
    CLASSIFY: "classifies texts",
    FILL: "fills masks",
    TAG: "classifies tokens",
    ANSWER: "finds answers in a text",
    ZERO_SHOT: "classifies by any labels",
    DECIDE: "answers questions with probabilities",
    MODERATE: "classifies texts into labels with names",
    SPARSE: "makes sparse vectors",
    LATE: "makes a vector for each token, as ColBERT does",
    CLASSIFY_IMAGE: "classifies images",
    EMBED_IMAGE: "embeds images",
    LABEL_IMAGE: "classifies images by any labels",
    CHAT_IMAGE: "chats about pictures",
    GENERATE: "writes text",
    SEQ2SEQ: "is an encoder-decoder for texts",
    JUDGE: "classifies texts or pairs of texts",
    TOKENIZE: "has a tokenizer",
    FILL_MIDDLE: "fills in the middle of texts",
}
_SHARED = {
    GENERATE: (COMPLETE, TRANSLATE, SUMMARIZE, REWRITE),
    SEQ2SEQ: (TRANSLATE, SUMMARIZE, REWRITE),
}

SOUND = "@-"  # as the file of a form: the command pipes the service's sample into it
SAMPLE = "sample.flac"  # the path of the sample, which the service sends if a model transcribes

_UNNAMED = re.compile(r"(?i)label[ _-]?\d+|\d+")  # labels that a checkpoint has by default
_CHAT_TEMPERATURE = 0.3  # where the folder names none: at 1, the default of OpenAI's API, small models talk nonsense
_QUESTION = "What is gravity?"  # `chat` is sure of the first tokens of its answer, whatever the kernels
_SENTENCES = ["A cat sleeps on the mat.", "A kitten naps on the rug."]
_FACT = "Ada Lovelace was born in London in 1815."


@dataclass(frozen=True, slots=True)
class Capability:
    """An ability of a model, and a request that shows it: a POST of `body` as JSON, or of `form` with a file."""

    name: str
    path: str
    body: Json = field(default_factory=dict)
    form: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        return {name: value for name, value in asdict(self).items() if value}

    def curl(self, url: str, *, with_key: bool = False) -> str:
        """Return the request as a command for a shell; the key is the shell's variable TRIPTYCH_API_KEY."""
        key = ' -H "Authorization: Bearer $TRIPTYCH_API_KEY"' if with_key else ""
        if self.form:
            fields = "".join(f" -F {_quoted(f'{name}={value}')}" for name, value in self.form.items())
            return f"curl -s {url}/{SAMPLE}{key} | curl {url}{self.path}{key}{fields}"
        data = _quoted(json.dumps(self.body, ensure_ascii=False))
        return f"curl {url}{self.path}{key} -H 'Content-Type: application/json' -d {data}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def capabilities(served: ServedModel) -> list[Capability]:
    """Return the abilities of a model, the most particular first."""
    if not served.reads_text:
        return list(_of_sound(served))
    if served.config.only_images:
        return list(_of_images(served))
    if served.config.joint is not None:
        return list(_of_texts_and_images(served))
    if served.loaded and served.tokenizer is None:
        return [_of_ids(served)]
    if served.is_encoder_decoder and served.config.can_generate:
        return list(_of_pairs(served))
    return list(_of_decoder(served) if served.config.can_generate else _of_encoder(served))


@dataclass(frozen=True, slots=True)
class Choice:
    """The first model with an ability, for the examples of routes."""

    ability: str
    model: str
    mask: str  # its mask token
    text: str  # a text for it
    path: str  # of its own example
    body: str  # of that, as JSON


def has_categories(labels: Sequence[str]) -> bool:
    """Whether a classifier's labels have names, and are not those of entailment or of relevance."""
    is_entailment = any(label.lower().startswith("entail") for label in labels)
    return len(labels) > 1 and not is_entailment and not all(map(_UNNAMED.fullmatch, labels))


def choices(models: Iterable[ServedModel]) -> dict[str, Choice]:
    """Return the first of the models that has each ability, loaded ones first."""
    found: dict[str, Choice] = {}
    for served in sorted(models, key=lambda one: not one.loaded):
        mask = served.tokenizer.mask_token if served.tokenizer is not None else None
        if served.tokenizer is None and served.loaded:
            continue  # the examples of routes are texts
        for one in capabilities(served):
            said = (one.body.get("messages") or [{}])[0].get("content")
            text = one.body.get("prompt") or (said if isinstance(said, str) else "") or ""
            body = json.dumps(one.body, ensure_ascii=False)
            shared = [name for name, members in _SHARED.items() if one.name in members]
            for ability in (one.name, *shared):
                found.setdefault(ability, Choice(ability, served.name, mask or "", text, one.path, body))
        head = served.config.classifier
        judges = head is not None and not head.per_token and not served.config.only_images
        fills = served.config.can_generate and served.infilling is not None
        named = judges and head is not None and has_categories(head.labels)
        also = (TOKENIZE, served.tokenizer is not None), (JUDGE, judges), (MODERATE, named), (FILL_MIDDLE, fills)
        for ability, has in also:
            if has:
                found.setdefault(ability, Choice(ability, served.name, mask or "", "", "", ""))
    return found


def _of_sound(served: ServedModel) -> Iterable[Capability]:
    tokens = served.checkpoint.speech
    if tokens is None or served.checkpoint.lacks_for_speech or (served.loaded and served.tokenizer is None):
        return
    form = {"model": served.name, "file": SOUND}
    yield Capability(TRANSCRIBE, "/v1/audio/transcriptions", form=form)
    if "translate" in tokens.tasks:
        yield Capability(SPEECH_TRANSLATE, "/v1/audio/translations", form=form)


def _of_images(served: ServedModel) -> Iterable[Capability]:
    if served.config.classifier is not None:
        yield Capability(CLASSIFY_IMAGE, "/pipeline/image-classification", {"model": served.name, "inputs": PIXEL})
    yield Capability(EMBED_IMAGE, "/encode", {"model": served.name, "input": [{"image": PIXEL}]})


def _of_texts_and_images(served: ServedModel) -> Iterable[Capability]:
    name = served.name
    if not served.loaded or served.tokenizer is not None:
        body = {"model": name, "inputs": PIXEL, "parameters": {"candidate_labels": ["a cat", "a dog"]}}
        yield Capability(LABEL_IMAGE, "/pipeline/zero-shot-image-classification", body)
        yield Capability(EMBED, "/v1/embeddings", {"model": name, "input": _SENTENCES})
    yield Capability(EMBED_IMAGE, "/v1/embeddings", {"model": name, "input": [{"image": PIXEL}]})


def _of_ids(served: ServedModel) -> Capability:
    """Return the ability of a model without a tokenizer, with token ids that each vocabulary has."""
    ids = list(range(min(3, served.source_vocab_size)))
    if served.config.can_generate:
        return Capability(COMPLETE, "/generate", {"model": served.name, "prompt": ids, "max_tokens": 16})
    return Capability(EMBED, "/encode", {"model": served.name, "input": ids})


def _of_decoder(served: ServedModel) -> Iterable[Capability]:
    text = served.example
    if served.chat is not None:
        body: Json = {
            "model": served.name,
            "messages": [{"role": "user", "content": text or _QUESTION}],
            "max_tokens": 64,
        }
        if "temperature" not in served.checkpoint.sampling_defaults:
            body["temperature"] = _CHAT_TEMPERATURE
        yield Capability(CHAT, "/v1/chat/completions", body)
        if processing_of(served) is not None:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            asked = [image, {"type": "text", "text": "What is this?"}]
            yield Capability(
                CHAT_IMAGE, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": asked}]}
            )
    prompt = "The capital of France is" if served.chat is not None else text or "Once upon a time"
    yield Capability(COMPLETE, "/generate", {"model": served.name, "prompt": prompt, "max_tokens": 32})
    if served.chat is not None:
        yield _decision(served, "The statement is about a person.")


def _decision(served: ServedModel, statement: str) -> Capability:
    question = {"type": "predicate", "instructions": statement}
    return Capability(DECIDE, "/v1/decisions", {"model": served.name, "input": _FACT, "questions": [question]})


def _of_pairs(served: ServedModel) -> Iterable[Capability]:
    """Yield the abilities of an encoder-decoder that reads text."""
    body: Json = {"model": served.name, "prompt": served.example or "The weather is nice today."}
    languages = languages_to_try(served)
    if languages is not None:
        yield Capability(TRANSLATE, "/generate", body | languages)
    if "summarization" in served.checkpoint.tasks:
        yield Capability(SUMMARIZE, "/generate", body | {"task": "summarization"})
    if languages is None:
        yield Capability(REWRITE, "/generate", body)


def _of_encoder(served: ServedModel) -> Iterable[Capability]:
    head, name = served.config.classifier, served.name
    made = available(served)
    text = served.example
    documents = ["Paris is the capital of France.", "The cat sleeps."]
    rank = Capability(
        RERANK, "/v1/rerank", {"model": name, "query": "What is the capital of France?", "documents": documents}
    )
    if head is not None and not head.per_token:
        if len(head.labels) == 1:
            yield rank
        elif not head.spans:
            yield Capability(CLASSIFY, "/v1/classify", {"model": name, "input": [text or "What a fine film!"]})
    mask = served.tokenizer.mask_token if served.tokenizer is not None else None
    if "fill_mask" in made and mask:
        asked = text if mask in text else f"Paris is the {mask} of France."
        yield Capability(FILL, "/encode", {"model": name, "input": asked, "output": "fill_mask"})
    if "zero_shot" in made:
        labels = {"labels": ["sports", "science"]}
        yield Capability(ZERO_SHOT, "/encode", {"model": name, "input": _FACT, "output": "zero_shot", **labels})
        yield _decision(served, "A person was born in London.")
    if "token_classification" in made:
        yield Capability(TAG, "/encode", {"model": name, "input": text or _FACT, "output": "token_classification"})
    if "question_answering" in made:
        pair = {"text": "Where was Ada Lovelace born?", "text_pair": _FACT}
        yield Capability(ANSWER, "/encode", {"model": name, "input": [pair], "output": "question_answering"})
    if head is None:
        yield Capability(EMBED, "/v1/embeddings", {"model": name, "input": _SENTENCES})
        yield rank
    for ability, output in ((SPARSE, "sparse"), (LATE, "multi_vector")):
        if output in made:
            yield Capability(ability, "/encode", {"model": name, "input": _SENTENCES, "output": output})
