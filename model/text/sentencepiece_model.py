"""Reads SentencePiece model files (`spiece.model`, `tokenizer.model`, `source.spm`) without the library that made them.

A file is one protocol buffer message: the pieces with their scores, the trainer's settings and the normalizer's. Only
the fields that tokenisation needs are read, by the wire format's rules (varint, 64-bit, length-delimited and 32-bit
fields).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from triptych.model.errors import ConfigError
from triptych.model.system.folder_files import read_file

SPACE = "\u2581"  # how pieces show a space


class PieceKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # special tokens, which no text becomes
    USER_DEFINED = 4  # found in a text before anything else
    UNUSED = 5
    BYTE = 6  # one byte of a character that is not in the vocabulary


class Algorithm(IntEnum):
    UNIGRAM = 1  # the likeliest segmentation (Kudo 2018)
    BPE = 2  # merges by score (Sennrich et al. 2016)


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(slots=True)
class SentencePieceModel:
    """The pieces by id, and the settings that change ids."""

    pieces: list[Piece] = field(default_factory=list)
    algorithm: Algorithm = Algorithm.UNIGRAM
    unknown_id: int = 0
    byte_fallback: bool = False
    charsmap: bytes = b""  # compiled rules of character normalization; empty: none
    add_dummy_prefix: bool = True  # a text begins with a space
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True  # spaces become SPACE
    treat_whitespace_as_suffix: bool = False  # spaces end pieces


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a model file; raises `ConfigError` if it is none."""
    where = f"{path.parent.name}: {path.name}"
    model, content = SentencePieceModel(), read_file(path)
    try:
        for number, value in _fields(content):
            if number == 1:
                model.pieces.append(_piece(_bytes(value)))
            elif number == 2:
                _trainer(model, _bytes(value))
            elif number == 3:
                _normalizer(model, _bytes(value))
    except (ValueError, struct.error, IndexError) as error:
        raise ConfigError(f"{where} is not a SentencePiece model: {error}") from None
    if not 0 <= model.unknown_id < len(model.pieces):
        raise ConfigError(f"{where} is not a SentencePiece model: its unknown piece is missing")
    return model


def _piece(message: bytes) -> Piece:
    text, score, kind = "", 0.0, PieceKind.NORMAL
    for number, value in _fields(message):
        if number == 1:
            text = _bytes(value).decode("utf-8")
        elif number == 2:
            [score] = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = PieceKind(_integer(value))
    return Piece(text, score, kind)


def _trainer(model: SentencePieceModel, message: bytes) -> None:
    for number, value in _fields(message):
        if number == 3:
            model.algorithm = Algorithm(_integer(value))
        elif number == 35:
            model.byte_fallback = bool(_integer(value))
        elif number == 40:
            model.unknown_id = _integer(value)
        elif number == 24:
            model.treat_whitespace_as_suffix = bool(_integer(value))


def _normalizer(model: SentencePieceModel, message: bytes) -> None:
    for number, value in _fields(message):
        if number == 2:
            model.charsmap = _bytes(value)
        elif number == 3:
            model.add_dummy_prefix = bool(_integer(value))
        elif number == 4:
            model.remove_extra_whitespaces = bool(_integer(value))
        elif number == 5:
            model.escape_whitespaces = bool(_integer(value))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field: an integer, or the bytes of anything else."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        length, at = {1: (8, at), 5: (4, at)}.get(kind) or (_varint(message, at) if kind == 2 else (-1, at))
        if length < 0 or at + length > len(message):
            raise ValueError("a field is damaged")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is damaged")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value
