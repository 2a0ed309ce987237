"""The inputs of an /encode body as sent: texts, pairs of texts, token ids or images."""

from __future__ import annotations

import msgspec

from service.schemas.encode_bodies import EncodeBody
from service.schemas.types import ImageFile, TextPair


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


def inputs_of(body: EncodeBody) -> list[EncodeInput]:
    """Return the inputs in order, each with the name of its place in the body."""
    value = body.input
    if isinstance(value, str):
        return [EncodeInput("input", text=value)]
    if isinstance(value[0], int):
        return [_input(value, "input")]
    return [_input(one, f"input[{index}]") for index, one in enumerate(value)]


def _input(one: object, param: str) -> EncodeInput:
    if isinstance(one, ImageFile):
        return EncodeInput(param, image=one.image)
    if isinstance(one, TextPair):
        return EncodeInput(param, text=one.text, pair=one.text_pair)
    if isinstance(one, str):
        return EncodeInput(param, text=one)
    return EncodeInput(param, ids=tuple(one))  # type: ignore[arg-type]
