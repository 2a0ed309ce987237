"""The parts of the table of outputs: what an output needs, and the functions that plan and show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from model.api.request import EncodeOutput, EncodeTask
from model.api.stats import ModelInfo
from model.text.tokenizer import Encoded, Located, Tokenizer
from service.core.errors import invalid, too_large
from service.core.models import ServedModel
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits

# -- The inputs of an /encode body as sent: texts, pairs of texts, token ids or images.


class EncodeInput(msgspec.Struct, frozen=True):
    """Holds one input as sent: texts, ids or an image file."""

    param: str
    text: str = ""
    pair: str | None = None
    ids: tuple[int, ...] | None = None
    image: str | None = None  # base64

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.pair or "")

    @property
    def is_text(self) -> bool:
        """Whether it is a single text."""
        return self.ids is None and self.image is None and self.pair is None


Json = dict[str, Any]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that an output needs of a model: `lacks` completes the sentence "model X ..."."""

    lacks: str
    met: Callable[[ServedModel], bool]
    of_tokenizer: bool = False  # known once the model is loaded


class Part(msgspec.Struct, frozen=True):
    """One input of the engine with its result; a long text, or one with several labels, has several."""

    sent: EncodeInput
    encoded: Encoded
    output: EncodeOutput

    @property
    def values(self) -> Array:
        """The engine's numbers in their shape."""
        return np.frombuffer(self.output.data, dtype="<f4").reshape(self.output.shape)

    @property
    def indices(self) -> NDArray[np.int32]:
        return np.frombuffer(self.output.indices, dtype="<i4").reshape(self.output.shape)

    @property
    def located(self) -> Located:
        assert isinstance(self.encoded, Located)
        return self.encoded


class Found(msgspec.Struct, frozen=True):
    """Everything about one input of a body, once the engine has answered."""

    body: EncodeBody
    served: ServedModel
    sent: EncodeInput
    parts: Sequence[Part]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.served.require_tokenizer(self.sent.param)


@dataclass(frozen=True, slots=True)
class Output:
    """One value of `output` in a body of /encode.

    `fields` are those of the body that have a meaning with it, beside the ones that always have. `readings` makes the
    texts that the engine reads of an input, `as_read` their tokens of what the tokenizer made, `settings` the fields of
    their `EncodeRequest`s, `item` what the reply has.
    """

    name: str
    task: EncodeTask
    item: Callable[[Found], Json]
    needs: tuple[Need, ...] = ()
    fields: frozenset[str] = frozenset()
    offsets: bool = False  # texts are tokenised with the places of their tokens
    detailed: bool = False  # something for each token or mask, or weights of the vocabulary: more than a vector
    labelled: bool = False  # numbers for each of the classifier's labels, which the reply lists
    windows: bool = False  # a text that is too long becomes several inputs of the engine
    verbatim: bool = False  # texts are tokenised as they are, without prompts and lower case of a checkpoint's settings
    heavy: bool = False  # items are made in a thread: texts are decoded, or spans compared
    room: Callable[[CheckedInputs], int | None] | None = None  # tokens of a text, below the model's own limit
    as_read: Callable[[CheckedInputs, EncodeInput, Encoded], Encoded] | None = None
    readings: Callable[[CheckedInputs, EncodeInput], list[EncodeInput]] | None = None
    settings: Callable[[CheckedInputs, EncodeInput, Encoded], Mapping[str, Any]] | None = None


class EncodeBounds(NamedTuple):
    """How many inputs, and tokens of all of them, a request may have; `uncounted` of the inputs are free (a query)."""

    inputs: int
    tokens: int
    uncounted: int = 0

    def check_inputs(self, count: int) -> None:
        """Raise a 413 for more inputs of the model, with windows and labels."""
        if count > self.inputs + self.uncounted:
            message = f"input makes more than {self.inputs} inputs of the model, with labels and windows"
            raise too_large(message, "input", "too_many_inputs")

    def check_tokens(self, tokens: int) -> None:
        """Raise a 413 for more tokens."""
        if tokens > self.tokens:
            raise too_large(f"input has {tokens} tokens in all, more than {self.tokens}", "input", "too_many_tokens")


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """A body of /encode that was checked before its texts are tokenised."""

    body: EncodeBody
    served: ServedModel
    info: ModelInfo
    limits: Limits
    bounds: EncodeBounds
    output: Output
    inputs: tuple[EncodeInput, ...]
    prompt: str  # in front of each text


def at_most(name: str, value: int | None, bound: int) -> None:
    """Raise a 400 that names the field for a value above its bound."""
    if value is not None and value > bound:
        raise invalid(f"{name} must be at most {bound}", name)


def softmax(logits: Array) -> Array:
    """Return probabilities over the last dimension."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: Array = weights / weights.sum(axis=-1, keepdims=True)
    return found
