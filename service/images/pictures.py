"""Pictures of prompts: parts of messages, their files decoded, and the text that stands for them in a prompt.

In the messages of a conversation a picture is the part that `picture` makes. Templates get it without its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triptych.model.api.request import ImageSpan
from triptych.model.api.stats import ModelInfo
from triptych.model.text.spelled_marks import SpelledMarks
from triptych.model.vision.pictures import PictureProcessing, PreparedPicture, image_spans
from triptych.service.core.coded_files import file_bytes
from triptych.service.core.context_bound import context_exceeded
from triptych.service.core.errors import ApiError, invalid, too_large
from triptych.service.core.models import ServedModel
from triptych.service.core.request_context import current
from triptych.service.images.files import BAD_IMAGE, decoded
from triptych.service.images.image_pool import ImagePool

Json = dict[str, Any]
Content = str | list[Json]

_TYPE = "image"  # of the parts that templates read
_ROLES = ("user", "tool")  # whose messages may have pictures


def picture(file: str, param: str, detail: str | None = None) -> Json:
    """Return the part of a message for a file in base64 or a data URL, which is the field `param` of a body."""
    return {"type": _TYPE, "file": file, "param": param, "detail": detail or "auto"}


def text(words: str) -> Json:
    """Return a part of text."""
    return {"type": "text", "text": words}


def content_of(parts: Sequence[Json], role: str) -> Content:
    """Return the content of a message of `role`: its parts if it has pictures, else its texts joined by line breaks."""
    images = [part for part in parts if part["type"] == _TYPE]
    if not images:
        return "\n".join(part["text"] for part in parts)
    if role not in _ROLES:
        param = images[0]["param"]
        raise invalid(f"{param}: a message of the {role} has no images; those of users and tools do", param)
    return list(parts)


def merged(contents: Sequence[Content], between: str = "\n") -> Content:
    """Return several contents as one."""
    texts = [one for one in contents if isinstance(one, str)]
    if len(texts) == len(contents):
        return between.join(texts)
    found: list[Json] = []
    for one in contents:
        found += [text(one + between)] if isinstance(one, str) else one
    return found


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the pictures of messages, in order."""
    contents = (one.get("content") for one in messages)
    return [part for parts in contents if isinstance(parts, list) for part in parts if part.get("type") == _TYPE]


def without_files(messages: Sequence[Json]) -> list[Json]:
    """Return the messages as templates read them."""
    return [one | {"content": list(_shown(one["content"]))} if _has(one) else one for one in messages]


def _has(message: Json) -> bool:
    return isinstance(message.get("content"), list) and bool(pictures_of([message]))


def _shown(parts: Sequence[Json]) -> Iterator[Json]:
    return ({"type": _TYPE} if part.get("type") == _TYPE else part for part in parts)


def processing_of(served: ServedModel, info: ModelInfo | None = None) -> PictureProcessing | None:
    """Return how a model reads pictures in prompts; None: it does not.

    `info` is of a loaded model, whose engine knows whether it computes them on its device.
    """
    reads = served.engine.tensor_parallel_size == 1 and (info is None or info.reads_pictures)
    return served.checkpoint.pictures if reads else None


def spelled_marks(processing: PictureProcessing) -> SpelledMarks:
    """Return the tokens that stand for pictures, to find them in texts of messages."""
    return SpelledMarks((processing.mark, processing.token))


class Pictures:
    """The pictures of one request: checked at once, decoded when its prompt is known. It keeps what it has decoded."""

    def __init__(self, pool: ImagePool, served: ServedModel, info: ModelInfo, found: Sequence[Json], most: int) -> None:
        """Check the pictures `found`; raises an `ApiError` that names the first that cannot be read."""
        self._served = served
        self._images = pool.request()
        self._prepared: dict[tuple[str, str], PreparedPicture] = {}  # by file and detail
        self.processing = processing_of(served, info)
        if found and self.processing is None:
            param = found[0]["param"]
            raise invalid(f"{param}: model {served.name} reads text, not images", param, "not_supported")
        if len(found) > most:
            raise too_large(f"{found[most]['param']}: more than {most} images are not taken", found[most]["param"])
        self._files = {one["file"]: file_bytes(one["file"], one["param"], BAD_IMAGE) for one in found}
        if found and (context := current()) is not None:
            context.at_end(self._images.close)

    async def decode(self, found: Sequence[Json], context: int | None, param: str) -> list[PreparedPicture]:
        """Return the pictures as the model reads them; raises an `ApiError` for a broken file, or for too many tokens.

        `context` is the most tokens that they may have, None: any number. `param` is the field of the prompt.
        """
        positions, pictures = 0, []
        for one in found:
            assert self.processing is not None
            key = one["file"], one["detail"]
            if key not in self._prepared:
                work = self._images.prepare_picture(self._files[one["file"]], self.processing, one["detail"])
                self._prepared[key] = await decoded(work, one["param"])
            pictures.append(self._prepared[key])
            positions += pictures[-1].num_positions * len(pictures[-1].parts)
            if context is not None and positions > context:
                raise context_exceeded(context, f"{param} has images of more than {positions - 1} tokens", param)
        return pictures

    def expanded(self, pieces: Sequence[str], pictures: Sequence[PreparedPicture], param: str) -> list[str]:
        """Return a prompt with what stands for each picture in the places that its template marked for them."""
        if self.processing is None:
            return list(pieces)
        mark, texts = self.processing.mark, iter([self.processing.placeholder(one) for one in pictures])
        marks = sum(piece.count(mark) for piece in pieces)
        if marks != len(pictures):
            message = f"{param}: the prompt has {marks} of {mark}, the mark of an image, for {len(pictures)} images"
            raise invalid(message, param, "image_places")
        return [re.sub(re.escape(mark), lambda _: next(texts), piece) for piece in pieces] if pictures else list(pieces)

    def spans(self, ids: Sequence[int], pictures: Sequence[PreparedPicture], param: str) -> tuple[ImageSpan, ...]:
        """Return where the pictures stand in a prompt; raises a 400 if it has other places of images."""
        config = self._served.config.pictures
        if self.processing is None or config is None:
            return ()
        try:
            return image_spans(ids, config.token_id, pictures)
        except ValueError:
            places = picture_places(ids, self._served)
            raise unlike(
                places, sum(one.num_positions * len(one.parts) for one in pictures), self._served, param
            ) from None


def picture_places(ids: Sequence[int], served: ServedModel) -> int:
    """Return how many tokens of a prompt stand for rows of pictures."""
    config = served.config.pictures
    if config is None or processing_of(served) is None or config.token_id not in ids:
        return 0
    return sum(one == config.token_id for one in ids)


def unlike(places: int, rows: int, served: ServedModel, param: str) -> ApiError:
    """Return the error for a prompt whose tokens of images are not those of its images."""
    config = served.config.pictures
    assert config is not None
    message = f"{param} has {places} tokens {config.token_id}, which stand for images; the images have {rows}"
    return invalid(message, param, "image_places")
