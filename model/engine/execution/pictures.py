"""Pictures on the device: their encodings, which rows of a step read them, and positions of rows and columns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.model.api.request import ImageSpan, Source
from triptych.model.config.pictures import PatchConfig
from triptych.model.engine.scheduling.block_pool import BlockHasher
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.network.inputs import GivenRows
from triptych.model.network.lora import AdapterRuns, LoraAdapter
from triptych.model.network.pictures import PicturePass
from triptych.model.network.transformer import Transformer
from triptych.model.system.devices import device_tensor, to_device
from triptych.model.vision.processing import ImageProcessing


class PicturePart(NamedTuple):
    """The rows of one picture that a step reads."""

    key: bytes  # of its encoding
    source: Source
    adapter: LoraAdapter | None
    rows: NDArray[np.int64]  # of the step
    first: int  # row of the picture that the first of them is


def picture_parts(
    steps: Sequence[ScheduledSequence], hasher: BlockHasher, adapters: Mapping[str, LoraAdapter]
) -> Iterator[PicturePart]:
    """Yield the pictures that the rows of a packed step read."""
    begin = 0
    for step in steps:
        request = step.sequence.request
        for index, span in enumerate(request.images):
            if span.start < step.start + step.num_tokens and span.stop > step.start:
                places = _places(span)
                first, last = np.searchsorted(places, (step.start, step.start + step.num_tokens)).tolist()
                rows = places[first:last] + (begin - step.start)
                key = hasher.picture(step.sequence, index)
                yield PicturePart(key, span.source, adapters.get(request.model), rows, first)
        begin += step.num_tokens


def _places(span: ImageSpan) -> NDArray[np.int64]:
    """Return which tokens of the prompt the rows of a picture take the places of."""
    rows = np.arange(span.source.num_positions)
    return span.start + rows + (rows // span.row_length if span.row_length else 0)


class PictureStore:
    """Encodings of pictures, at most `max_rows` rows but for those of one step; the least recently used go first."""

    def __init__(self, model: Transformer, processing: ImageProcessing, max_rows: int) -> None:
        self._model = model
        self._processing = processing
        self._max_rows = max_rows
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        # The digest and the adapter of a picture, and its unfinished pass.
        self._ahead: tuple[tuple[bytes, LoraAdapter | None], PicturePass] | None = None

    def encode_ahead(self, source: Source, layers: int, adapter: LoraAdapter | None = None) -> None:
        """Compute the next `layers` layers of the tower for a picture that a later step reads."""
        if self._ahead is None or self._ahead[0] != (source.digest, adapter):
            self._ahead = (source.digest, adapter), self._begin(source, adapter)
        self._ahead[1].advance(layers)

    def forget_ahead(self) -> None:
        """Drop the picture that `encode_ahead` started."""
        self._ahead = None

    def given(self, parts: Sequence[PicturePart]) -> GivenRows | None:
        """Return the vectors of the rows that a step reads; pictures that are not kept are encoded."""
        if not parts:
            return None
        vectors = [self._encoding(part)[part.first : part.first + len(part.rows)] for part in parts]
        self._evict({part.key for part in parts})
        rows = to_device(torch.from_numpy(np.concatenate([part.rows for part in parts])), self._model.device)
        assert self._model.decoder is not None and self._model.config.pictures is not None
        first, *added = torch.cat(vectors).split(self._model.decoder.config.hidden_size, dim=1)
        return GivenRows(rows, first, self._model.config.pictures.layer_token, tuple(added))

    def _encoding(self, part: PicturePart) -> Tensor:
        """Return the rows `[n, d]` of a picture."""
        if part.key not in self._known:
            ahead = self._ahead
            if ahead is not None and ahead[0] == (part.source.digest, part.adapter):
                self._ahead = None
                self._known[part.key] = ahead[1].finish()
            else:
                self._known[part.key] = self._begin(part.source, part.adapter).finish()
        self._known.move_to_end(part.key)
        return self._known[part.key]

    def _begin(self, source: Source, adapter: LoraAdapter | None) -> PicturePass:
        processing = self._processing
        pixels = torch.frombuffer(bytearray(source.features), dtype=torch.uint8).view(source.shape)
        scale, shift = (
            device_tensor(values, self._model.device, torch.float32)[:, None, None]
            for values in (processing.scale, processing.shift)
        )
        assert self._model.config.pictures is not None
        patches = self._model.config.pictures.patches
        count = source.shape[1] * source.shape[2] // patches.size**2 + patches.first
        runs = AdapterRuns.of_segments([adapter], [count])
        return self._model.begin_picture(to_device(pixels, self._model.device) * scale + shift, runs)

    def _evict(self, used: set[bytes]) -> None:
        rows = sum(map(len, self._known.values()))
        for key in list(self._known):
            if rows <= self._max_rows:
                return
            if key not in used:
                rows -= len(self._known.pop(key))


def key_ends(steps: Sequence[ScheduledSequence]) -> Tensor:
    """Return how many keys each row of a packed step sees `[T]`: those of a picture all of its rows."""
    found: list[NDArray[np.int64]] = []
    for step in steps:
        ends = np.arange(step.start + 1, step.start + step.num_tokens + 1)
        for span in step.sequence.request.images:
            ends[max(0, span.start - step.start) : max(0, span.stop - step.start)] = span.stop
        found.append(ends)
    return torch.from_numpy(np.concatenate(found))


# -- Positions of three coordinates: time, row and column. Those of a text count on, all three alike. A picture begins
# after them with its rows and columns, and what comes after it goes on from the largest.


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The positions of a prompt with pictures, and of what is generated after it."""

    of_prompt: NDArray[np.int64]  # [3, prompt]
    delay: int  # how much less than its place the position of a later token is

    @classmethod
    def of(cls, images: Sequence[ImageSpan], length: int, patches: PatchConfig) -> Coordinates:
        """Return those of a prompt of `length` tokens."""
        found, place, position = np.empty((3, length), np.int64), 0, 0
        for span in images:
            text = span.start - place
            found[:, place : span.start] = np.arange(position, position + text)
            position += text
            rows, columns = patches.rows_and_columns(span.source.shape)
            picture = found[:, span.start : span.stop].reshape(3, rows, columns)
            picture[0] = position
            picture[1] = position + np.arange(rows)[:, None]
            picture[2] = position + np.arange(columns)
            found[:, span.start : span.stop] = picture.reshape(3, -1)
            place, position = span.stop, position + max(rows, columns)
        found[:, place:] = np.arange(position, position + length - place)
        return cls(found, place - position)


def fill_positions(
    positions: NDArray[np.int64], steps: Sequence[ScheduledSequence], patches: PatchConfig
) -> Tensor | None:
    """Put the positions of sequences with pictures into a packed step's `positions` `[T]`, in place.

    Return the coordinates of all rows `[3, T]`; None where those of each row are equal.
    """
    differing: list[tuple[int, NDArray[np.int64]]] = []  # first row, and the coordinates from it on
    first = 0
    for step in steps:
        if step.sequence.request.images:
            known = coordinates_of(step.sequence, patches)
            positions[first : first + step.num_tokens] -= known.delay
            of_prompt = known.of_prompt[:, step.start : step.start + step.num_tokens]
            if of_prompt.size:
                positions[first : first + of_prompt.shape[1]] = of_prompt[0]
                differing.append((first, of_prompt))
        first += step.num_tokens
    if not differing:
        return None
    found = np.tile(positions, (3, 1))
    for first, of_prompt in differing:
        found[:, first : first + of_prompt.shape[1]] = of_prompt
    return torch.from_numpy(found)


def coordinates_of(sequence: SequenceState, patches: PatchConfig) -> Coordinates:
    """Return the positions of a sequence, computed once."""
    if sequence.coordinates is None:
        request = sequence.request
        sequence.coordinates = Coordinates.of(request.images, len(request.prompt_token_ids), patches)
    found: Coordinates = sequence.coordinates
    return found
