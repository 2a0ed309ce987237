"""The second pass over a body of /encode: tokenises texts, and truncates or divides them where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from triptych.model.errors import TooManyTokensError
from triptych.model.text.tokenizer import Encoded, Located
from triptych.service.core.context_bound import context_exceeded
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.planning.outputs.base import CheckedInputs, EncodeInput
from triptych.service.planning.tokenization import Side, check_vocabulary, truncate_ids, truncate_text

_DEFAULT_STRIDE = 128  # tokens that two adjacent windows of a long text share


class Reading(msgspec.Struct, frozen=True):
    """One input of the engine."""

    owner: int  # index of the body's input that it belongs to
    sent: EncodeInput  # its text as the engine reads it
    encoded: Encoded
    cut: bool = False  # whether it is truncated


def read(checked: CheckedInputs, texts: Sequence[tuple[int, EncodeInput]]) -> list[Reading]:
    """Tokenise each text, and truncate or divide it; raises an `ApiError` for a text that is too long."""
    body, served, output, bounds = checked.body, checked.served, checked.output, checked.bounds
    most = [checked.info.max_model_len, checked.info.max_num_batched_tokens, served.checkpoint.sentences.max_tokens]
    most.append(None if output.room is None else output.room(checked))
    limit = min(one for one in most if one)
    if output.offsets or body.split is not None:
        windows = (Reading(owner, one, window) for owner, one in texts for window in _windows(checked, one, limit))
        readings = list(islice(windows, bounds.inputs + 1))
        bounds.check_inputs(len(readings))
    elif body.chunks is not None:
        readings = [Reading(owner, one, _whole(one, served, limit)) for owner, one in texts]
    else:
        side: Side | None = body.truncate or None
        readings = []
        for owner, one in texts:
            encoded, is_cut = _fit_one(one, served, limit, side)
            seen = encoded if output.as_read is None else output.as_read(checked, one, encoded)
            readings.append(Reading(owner, one, seen, is_cut))
    bounds.check_tokens(sum(len(one.encoded.ids) for one in readings))
    return readings


def _fit_one(one: EncodeInput, served: ServedModel, limit: int, side: Side | None) -> tuple[Encoded, bool]:
    pairs = served.pairs if one.pair is not None else None
    try:
        encoded = _encode(one, served, limit if side is None else None)
    except TooManyTokensError as error:
        raise context_exceeded(limit, f"{one.param} has {error.count} tokens", one.param) from None
    if not encoded.ids:
        raise invalid(f"{one.param} is empty: it has no tokens", one.param, "empty_prompt")
    check_vocabulary(encoded.ids, served.source_vocab_size, one.param)
    if len(encoded.ids) <= limit:
        return encoded, False
    if side is None:  # token ids from the client; texts were checked above
        raise context_exceeded(limit, f"{one.param} has {len(encoded.ids)} tokens", one.param)
    if pairs is not None:
        if side == "left":
            raise invalid("truncate: documents are cut at the right end; found 'left', expected 'right'", "truncate")
        return Encoded(pairs.cut(served.require_tokenizer(one.param), encoded.ids, limit), ()), True
    if one.ids is not None:
        return Encoded(truncate_ids(one.ids, limit, side), ()), True
    return truncate_text(served.require_tokenizer(one.param), one.text, one.pair, encoded, limit, side), True


def _encode(one: EncodeInput, served: ServedModel, most: int | None) -> Encoded:
    if one.ids is not None:
        return Encoded(one.ids, ())
    tokenizer = served.require_tokenizer(one.param)
    if one.pair is not None and served.pairs is not None:
        return served.pairs.encode(tokenizer, one.text, one.pair, most)
    return tokenizer.encode(one.text, one.pair, most=most)


def _whole(one: EncodeInput, served: ServedModel, limit: int) -> Located:
    """Return the tokens of a text with their positions in it; raises a 400 if there are too many."""
    try:
        located = served.require_tokenizer(one.param).locate(one.text, most=limit)
    except TooManyTokensError as error:
        raise context_exceeded(limit, f"{one.param} has {error.count} tokens", one.param) from None
    check_vocabulary(located.ids, served.source_vocab_size, one.param)
    return located


def _windows(checked: CheckedInputs, one: EncodeInput, limit: int) -> Iterator[Located]:
    """Yield the tokens of a text in windows of `limit` tokens; adjacent windows share `stride` tokens.

    In a pair the second text is divided; every window has the first text and the special tokens.
    """
    served, bounds, stride = checked.served, checked.bounds, checked.body.stride
    try:
        located = served.require_tokenizer(one.param).locate(one.text, one.pair, most=bounds.tokens)
    except TooManyTokensError as error:
        bounds.check_tokens(error.count)
        raise
    check_vocabulary(located.ids, served.source_vocab_size, one.param)
    if len(located.ids) <= limit:
        if not any(of is not None for of in located.texts):
            raise invalid(f"{one.param} is empty: it has no tokens", one.param, "empty_prompt")
        yield located
        return
    divided = 0 if one.pair is None else 1
    inside = [at for at, of in enumerate(located.texts) if of == divided]
    room = limit - (len(located.ids) - len(inside))
    if room < 1:
        raise context_exceeded(limit, f"{one.param}.text leaves no room for tokens of the other text", one.param)
    common = min(_DEFAULT_STRIDE, room // 2) if stride is None else stride
    if common >= room:
        raise invalid(f"stride must be below the {room} tokens that a window has of {one.param}", "stride")
    before, after = range(inside[0]), range(inside[-1] + 1, len(located.ids))
    starts = range(0, max(1, len(inside) - common), room - common)
    for start in starts:
        yield located.keep([*before, *inside[start : start + room], *after])
