"""The types of the table of outputs: what an output needs, and the functions that plan and present it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import EncodeOutput, EncodeTask
from triptych.model.api.stats import ModelInfo
from triptych.model.text.tokenizer import Encoded, Located, Tokenizer
from triptych.service.core.errors import invalid, too_large
from triptych.service.core.models import ServedModel
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.settings.service_settings import Limits

# -- The inputs of a body of /encode, as sent: texts, pairs of texts, token ids or images.


class EncodeInput(msgspec.Struct, frozen=True):
    """One input as sent: one or two texts, token ids, or an image file."""

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
        """Whether the input is a single text."""
        return self.ids is None and self.image is None and self.pair is None


Json = dict[str, Any]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement of an output on a model. If it is not met, `lacks` completes the sentence "model X ..."."""

    lacks: str
    met: Callable[[ServedModel], bool]
    of_tokenizer: bool = False  # whether it is known only once the model is loaded


class PartResult(msgspec.Struct, frozen=True):
    """One input of the engine with its result. A long text, or one with several labels, has several parts."""

    sent: EncodeInput
    encoded: Encoded
    output: EncodeOutput

    @property
    def values(self) -> Array:
        """The engine's numbers as an array of their shape."""
        return np.frombuffer(self.output.data, dtype="<f4").reshape(self.output.shape)

    @property
    def indices(self) -> NDArray[np.int32]:
        return np.frombuffer(self.output.indices, dtype="<i4").reshape(self.output.shape)

    @property
    def located(self) -> Located:
        assert isinstance(self.encoded, Located)
        return self.encoded


class InputResult(msgspec.Struct, frozen=True):
    """One input of a body with its results from the engine."""

    body: EncodeBody
    served: ServedModel
    info: ModelInfo
    sent: EncodeInput
    parts: Sequence[PartResult]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.served.require_tokenizer(self.sent.param)


@dataclass(frozen=True, slots=True)
class OutputKind:
    """One value of `output` in a body of /encode.

    `fields` are the fields of the body that this output reads and not all others do. `readings` makes from an input the
    texts that the engine reads, `shared` the texts that all inputs have in common, and `as_read` changes their tokens.
    `settings` returns fields of their requests to the engine. `item` returns the item of the reply.
    """

    name: str
    task: EncodeTask
    item: Callable[[InputResult], Json]
    needs: tuple[Need, ...] = ()
    fields: frozenset[str] = frozenset()
    offsets: bool = False  # texts are tokenised with the positions of their tokens
    detailed: bool = False  # more than a vector: a result for each token or mask, or weights of the vocabulary
    labelled: bool = False  # a number for each of the classifier's labels, which the reply lists
    windows: bool = False  # a text that is too long is read in several windows
    verbatim: bool = False  # texts are tokenised unchanged: no prompt, no lower case of the checkpoint's settings
    heavy: bool = False  # items are made in a thread, because texts are decoded or spans compared
    room: Callable[[CheckedInputs], int | None] | None = None  # maximum tokens of a text; the model's limit holds too
    as_read: Callable[[CheckedInputs, EncodeInput, Encoded], Encoded] | None = None
    readings: Callable[[CheckedInputs, EncodeInput], list[EncodeInput]] | None = None
    shared: Callable[[CheckedInputs], list[EncodeInput]] | None = None
    settings: Callable[[CheckedInputs, EncodeInput, Encoded], Mapping[str, Any]] | None = None


class EncodeBounds(NamedTuple):
    """The maximum inputs of a request, and tokens of all of them; `uncounted` inputs (a query) do not count."""

    inputs: int
    tokens: int
    uncounted: int = 0

    def check_inputs(self, count: int) -> None:
        """Raise a 413 for too many inputs of the model; each window and each label makes one."""
        if count > self.inputs + self.uncounted:
            message = f"input makes more than {self.inputs} inputs of the model, with labels and windows"
            raise too_large(message, "input", "too_many_inputs")

    def check_tokens(self, tokens: int) -> None:
        """Raise a 413 for too many tokens."""
        if tokens > self.tokens:
            raise too_large(f"input has {tokens} tokens in all, more than {self.tokens}", "input", "too_many_tokens")


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """A body of /encode that has been checked, before its texts are tokenised."""

    body: EncodeBody
    served: ServedModel
    info: ModelInfo
    limits: Limits
    bounds: EncodeBounds
    output: OutputKind
    inputs: tuple[EncodeInput, ...]
    prompt: str  # prefix of each text


def at_most(name: str, value: int | None, bound: int) -> None:
    """Raise a 400 that names the field if its value is above `bound`."""
    if value is not None and value > bound:
        raise invalid(f"{name} must be at most {bound}", name)


def softmax(logits: Array) -> Array:
    """Return the softmax over the last dimension."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: Array = weights / weights.sum(axis=-1, keepdims=True)
    return found
