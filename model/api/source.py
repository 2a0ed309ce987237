"""What an encoder reads, as plain data: the token ids of a text, the pixels of an image, or the spectrogram of a sound.

A source is encoded whole. Sequences of one salt and one digest share the encoding and the cache blocks of its cross
keys and values while any of them is there (`model.engine.scheduling.block_manager`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256


class SourceKind(StrEnum):
    """How a source becomes the rows that an encoder starts from."""

    TOKENS = "tokens"  # rows of the token table
    IMAGE = "image"  # patches, after a learned first row
    AUDIO = "audio"  # two convolutions over the frames of a window


@dataclass(slots=True)
class Source:
    """One input of an encoder; made by `token_source`, `image_source` or `audio_source`, which compute the digest.

    Do not change it; it is not frozen because a frozen dataclass takes three times as long to make.
    """

    kind: SourceKind
    num_positions: int  # rows of encoder output
    digest: bytes  # SHA-256 of everything else
    token_ids: tuple[int, ...] = ()
    token_type_ids: tuple[int, ...] = ()  # segments, where the model tells two texts apart; empty: all of the first
    features: bytes = b""  # row-major; of an image pixels of 8 bits, of audio log-mel energies as little-endian float32
    shape: tuple[int, ...] = ()  # of the features: channels, height, width; mel bins, frames


def token_source(token_ids: tuple[int, ...], token_type_ids: tuple[int, ...] = ()) -> Source:
    """A text as token ids, one position each."""
    digest = _digest(SourceKind.TOKENS, array("q", token_ids).tobytes(), array("q", token_type_ids).tobytes())
    return Source(SourceKind.TOKENS, len(token_ids), digest, token_ids, token_type_ids)


def image_source(pixels: bytes, shape: tuple[int, int, int], num_positions: int) -> Source:
    """An image of `shape` (channels, height, width) with 8 bits a channel, `num_positions` rows once it is encoded."""
    digest = _digest(SourceKind.IMAGE, array("q", shape).tobytes(), pixels)
    return Source(SourceKind.IMAGE, num_positions, digest, features=pixels, shape=shape)


def audio_source(features: bytes, shape: tuple[int, int], num_positions: int) -> Source:
    """One window of sound as its log-mel spectrogram of `shape` (mel bins, frames), little-endian float32, row-major.

    The encoder makes `num_positions` rows of it. Frames are those of a whole window, padding included. Raises
    `ValueError` where the bytes are not those of the shape.
    """
    mel_bins, frames = shape
    if len(features) != 4 * mel_bins * frames:
        raise ValueError(f"features of {mel_bins} x {frames} take {4 * mel_bins * frames} bytes, found {len(features)}")
    digest = _digest(SourceKind.AUDIO, array("q", shape).tobytes(), features)
    return Source(SourceKind.AUDIO, num_positions, digest, features=features, shape=shape)


def _digest(kind: SourceKind, *parts: bytes) -> bytes:
    """SHA-256 over the kind and the parts. Each part follows its length, so other parts give another digest."""
    pieces = [kind.encode()]
    for part in parts:
        pieces += (len(part).to_bytes(8, "little"), part)
    return sha256(b"".join(pieces)).digest()
