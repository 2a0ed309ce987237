"""System One's API, which TypeSafe, Ollama and gateways have: named questions about a state.

A body becomes one of OpenAI's decisions, and the answers get their names back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from triptych.service.core.errors import shorten
from triptych.service.dialects.common import DialectBody, Extended, NotFilled, NotTrue, by_type
from triptych.service.dialects.decision_bodies import (
    MAX_CHOICES,
    MAX_INSTRUCTIONS,
    MAX_QUESTIONS,
    MAX_VALUE,
    Choice,
    DecisionBody,
    DecisionChoice,
    Level,
    Predicate,
    Question,
    Score,
    json_text,
)
from triptych.service.dialects.ollama_bodies import OllamaBody
from triptych.service.http.json_replies import Json

_SHORT = 64  # characters of a level that is a label itself; longer ones describe numbers

# -- The body. Texts may be given as JSON, which the model reads as it is written.


def _as_text(most: int | None) -> Callable[[Any], str]:
    """Return a function that writes JSON as text, of at most `most` characters; None: any number above 0."""

    def work(value: Any) -> str:
        text = value if isinstance(value, str) else json_text(value)
        if most is None and not text:
            raise PydanticCustomError("text_too_short", "Input should have at least 1 character")
        if most is not None and len(text) > most:
            raise PydanticCustomError(
                "text_too_long", "Input should have at most {most} characters as text", {"most": most}
            )
        return text

    return work


def _kind(value: Any) -> str:
    return "<object>" if isinstance(value, dict) else "<list>" if isinstance(value, list) else "<text>"


_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")] | Annotated[list[Any], Tag("<list>")],
    Discriminator(_kind),
]
State = Annotated[_Content, AfterValidator(_as_text(None))]
Content = Annotated[_Content, AfterValidator(_as_text(MAX_INSTRUCTIONS))]
_Key = Annotated[str, Field(min_length=1, max_length=MAX_VALUE)]


class Noul(DialectBody):
    """How likely a statement is true."""

    type: Literal["noul"] = Field(description="The kind of question.", examples=["noul"])
    instructions: Content | None = Field(
        None, description="The statement, or a question; or `criteria` alone.", examples=["The writer complains."]
    )
    criteria: dict[Literal["true", "false"], Content | None] | None = Field(
        None, description="What true and false mean.", examples=[{"true": "There is a complaint."}]
    )

    @model_validator(mode="after")
    def _asks(self) -> Noul:
        if not self.instructions and not any((self.criteria or {}).values()):
            raise PydanticCustomError("no_question", "Input should have instructions or criteria")
        return self


class NamedChoice(DialectBody):
    """Which of some values fits."""

    type: Literal["choice"] = Field(description="The kind of question.", examples=["choice"])
    instructions: Content | None = Field(None, description="What to choose.", examples=["Who should answer?"])
    criteria: dict[_Key, Content | None] = Field(
        min_length=2,
        max_length=MAX_CHOICES,
        description="The values, and what each means.",
        examples=[{"billing": "Invoices.", "delivery": None}],
    )


class Levels(DialectBody):
    """Which of some ordered levels fits."""

    type: Literal["score"] = Field(description="The kind of question.", examples=["score"])
    instructions: Content | None = Field(None, description="What to rate.", examples=["How angry is the writer?"])
    criteria: list[Content] = Field(
        min_length=2,
        max_length=MAX_CHOICES,
        description="The levels, the lowest first; the first has the value 0.",
        examples=[["calm", "angry"]],
    )


NamedQuestion = Annotated[
    Annotated[Noul, Tag("<noul>")] | Annotated[NamedChoice, Tag("<choice>")] | Annotated[Levels, Tag("<score>")],
    Discriminator(
        by_type({name: f"<{name}>" for name in ("noul", "choice", "score")}),
        custom_error_type="union_type",
        custom_error_message="Input should be a question of the type noul, choice or score",
    ),
]


class SystemOneBody(OllamaBody):
    """Answer named questions about a state with probabilities, as TypeSafe and Ollama do."""

    state: State = Field(description="What the questions are about.", examples=["The parcel came two weeks late."])
    questions: dict[_Key, NamedQuestion] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        description="The questions, by the names of their answers.",
        examples=[{"complaint": {"type": "noul", "instructions": "The writer complains."}}],
    )
    stream: NotTrue = None
    images: NotFilled = None
    assets: NotFilled = None
    audio: NotFilled = None
    videos: NotFilled = None


# -- What it becomes.


def decision(body: SystemOneBody) -> DecisionBody:
    """Return the body of OpenAI's decisions; its fields are valid already."""
    fields = {name: getattr(body, name) for name in Extended.model_fields}
    return DecisionBody.model_construct(**fields, input=body.state, questions=[*map(_asked, body.questions.values())])


def _asked(question: Noul | NamedChoice | Levels) -> Question:
    said = str(question.instructions or "")
    match question:
        case Noul():
            meanings = [f"{value}: {meaning}" for value, meaning in (question.criteria or {}).items() if meaning]
            lines = "\n".join(filter(None, [said, *meanings]))
            return Predicate.model_construct(type="predicate", name=None, instructions=lines)
        case NamedChoice():
            values = [
                DecisionChoice.model_construct(value=value, description=meaning)
                for value, meaning in question.criteria.items()
            ]
            return Choice.model_construct(type="choice", name=None, instructions=said, choices=values)
        case Levels():
            texts = [*map(str, question.criteria)]
            if len(set(texts)) == len(texts) and max(map(len, texts)) <= _SHORT:
                levels = [Level.model_construct(label=text, description=None) for text in texts]
            else:
                levels = [Level.model_construct(label=str(at), description=text) for at, text in enumerate(texts)]
            return Score.model_construct(type="score", name=None, instructions=said, levels=levels)


def names(body: SystemOneBody) -> dict[str, str]:
    """Return the body's own field names, by those of the decision."""
    found: dict[str, str] = {}
    for at, (name, question) in enumerate(body.questions.items()):
        own, place = f"questions.{shorten(name)}", f"questions[{at}]"
        if isinstance(question, NamedChoice):
            values = enumerate(question.criteria)
            found |= {f"{place}.choices[{index}]": f"{own}.criteria.{shorten(value)}" for index, value in values}
        found |= {f"{place}.levels": f"{own}.criteria", place: own}
    return found | {"input": "state"}


# -- The reply.


def reply(body: SystemOneBody, found: Json) -> Json:
    """Translate the reply of a decision."""
    answers = zip(body.questions.items(), found["answers"], strict=True)
    usage = {name: found["usage"][name] for name in ("input_tokens", "output_tokens")}
    return {
        "model": found["model"],
        "answers": {name: _answer(question, one) for (name, question), one in answers},
        "usage": usage,
    }


def _answer(question: Noul | NamedChoice | Levels, one: Mapping[str, Any]) -> Json:
    more = {"mass": one["mass"]} if "mass" in one else {}
    if isinstance(question, Noul):
        return {"type": "noul", "noul": one["probability"], **more}
    shares = [entry["probability"] for entry in one["probabilities"]]
    if isinstance(question, NamedChoice):
        head = {"type": "choice", "choice": one["choice"]}
        keys = list(question.criteria)
    else:
        keys = [str(at) for at in range(len(shares))]
        legend = dict(zip(keys, question.criteria, strict=True))
        head = {"type": "score", "score": one["score"], "legend": legend}
    probabilities = dict(zip(keys, shares, strict=True))
    return head | {"probabilities": probabilities, "confidence": _concentration(shares), **more}


def _concentration(shares: Sequence[float]) -> float:
    """Return 1 if one probability is 1, and 0 if all are equal: by their entropy, as in Ollama."""
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return max(0.0, 1 - entropy / math.log(len(shares)))
