"""Outputs that are numbers: vectors, scores, and weights of vocabulary entries."""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.model.checkpoint.sentence_transformers import LateInteraction
from triptych.model.config.attention import RotaryConfig
from triptych.model.config.model import ClassifierInput
from triptych.model.text.tokenizer import Encoded, Located
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.planning.outputs.base import Array, CheckedInputs, EncodeInput, InputResult, Json
from triptych.service.schemas.encode_bodies import EncodeBody

_NORMALIZED = ((-1.0,), (1.0,))  # the range of every dimension


def embedding_settings(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Return the ranges of tokens of `chunks`; refuse integer vectors whose range of values is not known."""
    body, served = checked.body, checked.served
    scaled = body.embedding_type in ("int8", "uint8")
    if body.ranges is not None and not scaled:
        raise invalid(f"ranges has no meaning with embedding_type '{body.embedding_type}'", "ranges")
    if scaled and body.ranges is None and not _normalizes(body, served):
        message = f"embedding_type '{body.embedding_type}' needs ranges, or normalize: true"
        raise invalid(message, "embedding_type")
    if body.ranges is not None:
        size = body.dimensions or served.vector_size(own_pooling=body.pooling == "default")
        low, high = body.ranges
        if len(low) != size or len(high) != size or not all(a < b for a, b in zip(low, high, strict=True)):
            raise invalid(f"ranges must have a lowest and a higher value for each of {size} dimensions", "ranges")
    if body.chunks is None:
        return {}
    assert isinstance(encoded, Located)
    shift = len(sent.text) - len(_only_text(body, sent))  # length of the prompt before the text
    places = [place for place, of in enumerate(encoded.texts) if of is not None]
    begins = [encoded.offsets[place][0] for place in places]
    return {"spans": tuple(_tokens_of(places, begins, chunk, shift, at) for at, chunk in enumerate(body.chunks))}


def divided_text(checked: CheckedInputs, sent: EncodeInput) -> list[EncodeInput]:
    """Refuse chunks and windows of an input that is not a text, and settings that exclude each other."""
    body, served = checked.body, checked.served
    if body.chunks is None and body.split is None and body.stride is None:
        return [sent]
    if body.stride is not None and body.split is None:
        raise invalid("stride has no meaning without split", "stride")
    for name in [name for name in ("chunks", "split") if getattr(body, name) is not None]:
        if not sent.is_text:
            raise invalid(f"{name} needs texts; {sent.param} is none", name)
        if served.tokenizer is None or not served.tokenizer.has_offsets:
            raise invalid(f"{name}: model {served.name} has no tokenizer that tells where tokens are in a text", name)
        if body.truncate is not False:
            raise invalid(f"{name} and truncate exclude each other", name)
    if body.chunks is not None:
        if body.split is not None:
            raise invalid("chunks and split exclude each other", "chunks")
        for at, (start, end) in enumerate(body.chunks):
            if not start < end <= len(_only_text(body, sent)):
                message = f"chunks[{at}] must be two places in the text of {len(sent.text)} characters, in order"
                raise invalid(message, f"chunks[{at}]")
    return [sent]


def _normalizes(body: EncodeBody, served: ServedModel) -> bool:
    """Whether vectors are scaled to length 1: the request decides, else the checkpoint."""
    return served.checkpoint.sentences.normalize if body.normalize is None else body.normalize


def _only_text(body: EncodeBody, sent: EncodeInput) -> str:
    value = body.input
    if isinstance(value, list) and len(value) > 1:
        raise invalid("chunks needs one text", "chunks")
    only = value if isinstance(value, str) else value[0]
    return only if isinstance(only, str) else sent.text


def _tokens_of(
    places: Sequence[int], begins: Sequence[int], chunk: Sequence[int], shift: int, at: int
) -> tuple[int, int]:
    """Return the range of tokens that begin within a chunk; raises a 400 for a chunk without any.

    `begins` are the characters at which the tokens at `places` begin, in ascending order.
    """
    first, last = (bisect_left(begins, place + shift) for place in chunk)
    if first == last:
        raise invalid(f"chunks[{at}] has no token that begins in it", f"chunks[{at}]")
    return places[first], places[last - 1] + 1


def embedding_item(result: InputResult) -> Json:
    """Return the vector, or those of all chunks or windows, as floats or integers, or their bytes in base64.

    The vectors of windows are averaged, weighted by their tokens, unless `split` is "separate".
    """
    body = result.body
    if body.chunks is not None:
        return {"embeddings": [_shown(vector, body) for vector in result.parts[0].values]}
    vectors = [part.values for part in result.parts]
    if body.split == "separate":
        places = [_place(part.located) for part in result.parts]
        return {"embeddings": [_shown(vector, body) for vector in vectors], "places": places}
    if len(vectors) == 1:
        return {"embedding": _shown(vectors[0], body)}
    weights = np.array([sum(of is not None for of in part.located.texts) for part in result.parts], np.float32)
    mean = (weights @ np.stack(vectors)) / weights.sum()
    if _normalizes(body, result.served):
        mean /= np.linalg.norm(mean)
    return {"embedding": _shown(mean.astype(np.float32), body)}


def _place(located: Located) -> list[int]:
    """Return the range of a window in the text: its first character, and the one after its last."""
    offsets = [one for one, of in zip(located.offsets, located.texts, strict=True) if of is not None]
    return [offsets[0][0], offsets[-1][1]]


def _shown(vector: Array, body: EncodeBody) -> Array | list[int] | str:
    numbers = vector if body.embedding_type == "float" else quantized(vector, body.embedding_type, body.ranges)
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return vector if body.embedding_type == "float" else numbers.tolist()


def quantized(vector: Array, kind: str, ranges: Sequence[Sequence[float]] | None = None) -> NDArray[np.integer[Any]]:
    """Quantize a vector `[D]` to integers `[D]` or bits `[D / 8]` (`quantize_embeddings` of sentence-transformers).

    Without `ranges` a dimension reaches from -1 to 1. Values outside the range are clipped.
    """
    if kind in ("binary", "ubinary"):
        bits = np.packbits(vector > 0)
        return bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    low, high = (np.asarray(one, np.float32) for one in ranges or _NORMALIZED)
    steps = np.clip((vector - low) / ((high - low) / 255), 0, 255)
    return steps.astype(np.uint8) if kind == "uint8" else (steps - 128).astype(np.int8)


def tokens_item(result: InputResult) -> Json:
    return _numbers(result, "tokens")


def scores_item(result: InputResult) -> Json:
    item = _numbers(result, "scores")
    if result.body.encoding_format != "base64":
        item["scores"] = item["scores"].tolist()  # a short list, with which dialects compute
    return item


def _numbers(result: InputResult, name: str) -> Json:
    """Return an array, which the reply writes as a list; or base64, with the shape if it is a matrix."""
    [part] = result.parts
    if result.body.encoding_format != "base64":
        return {name: part.values}
    item: Json = {name: base64.b64encode(part.output.data).decode()}
    if len(part.output.shape) > 1:
        item["shape"] = list(part.output.shape)
    return item


def end_of_sequence(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Refuse token ids without the end-of-sequence token, if the model's classifier reads that token."""
    served = checked.served
    head, ends = served.config.classifier, served.config.eos_token_ids
    if head is not None and head.input is ClassifierInput.EOS and not set(ends) & set(encoded.ids):
        raise invalid(f"{sent.param} has no end-of-sequence token {' or '.join(map(str, ends))}", sent.param)
    return {}


def sparse_settings(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Return how many entries to keep, and the tokens that have weights: all but special ones."""
    body, served = checked.body, checked.served
    sentences = served.checkpoint.sentences
    top_k = body.top_k or sentences.splade.most_entries
    if sentences.token_weight is None:
        return {"top_k": top_k}
    special = served.tokenizer.special_ids if served.tokenizer is not None else frozenset[int]()
    counted = tuple(at for at, token in enumerate(encoded.ids) if token not in special)
    return {"top_k": top_k, "positions": counted}


def sparse_item(result: InputResult) -> Json:
    """Return the ids of vocabulary entries, ascending, and their weights."""
    [part] = result.parts
    return {"indices": part.indices.tolist(), "weights": part.values.tolist()}


# -- multi_vector: a vector for each token, for late interaction (ColBERT). Queries and documents are read as in PyLate:
# a token after the first one tells a query from a document, queries are padded with mask tokens, and punctuation of
# documents gets no vector.


def settings_of(served: ServedModel) -> LateInteraction:
    late = served.checkpoint.sentences.late
    assert late is not None
    return late


def single_text(checked: CheckedInputs, sent: EncodeInput) -> list[EncodeInput]:
    """Refuse inputs other than a single text, and queries whose padding the network cannot compute."""
    body, served = checked.body, checked.served
    if not sent.is_text:
        raise invalid(f"{sent.param} must be a text", sent.param)
    late = settings_of(served)
    if body.input_type == "query" and late.expands and not late.attends and not _can_leave_unread(served, late):
        message = f"input_type: queries of model {served.name} are not served: its layers have biases or narrow windows"
        raise invalid(message, "input_type")
    return [sent]


def room(checked: CheckedInputs) -> int | None:
    """Return the maximum tokens of a text without its prefix; None: any number."""
    body, served = checked.body, checked.served
    late = settings_of(served)
    length = late.query_length if body.input_type == "query" else late.document_length
    return None if length is None else length - bool(_prefix(body, late))


def as_read(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Encoded:
    """Insert the prefix after the first token, and pad a query with mask tokens."""
    body, served = checked.body, checked.served
    late, tokenizer = settings_of(served), served.require_tokenizer(sent.param)
    ids, types = list(encoded.ids), list(encoded.type_ids)
    prefix = _prefix(body, late)
    if prefix:
        token = tokenizer.token_id(prefix)
        token = token if token is not None else tokenizer.unknown_id
        if token is None:
            raise invalid(f"output: model {served.name} has no token {prefix!r}", "output")
        ids.insert(1, token)
        types.insert(1, 0)
    if body.input_type == "query" and late.expands and tokenizer.mask_id is not None:
        missing = max(0, (late.query_length or 0) - len(ids))
        ids += [tokenizer.mask_id] * missing
        types += [0] * missing
    return Encoded(tuple(ids), tuple(types))


def vector_settings(checked: CheckedInputs, sent: EncodeInput, encoded: Encoded) -> Mapping[str, Any]:
    """Return the tokens that get a vector, and the number of last tokens that no other token attends to."""
    body, served = checked.body, checked.served
    late, tokenizer = settings_of(served), served.require_tokenizer(sent.param)
    if body.input_type == "query":
        filled = 0
        while late.expands and not late.attends and encoded.ids[-1 - filled] == tokenizer.mask_id:
            filled += 1
        return {"unread": filled, "positions": tuple(range(late.skips_first, len(encoded.ids)))}
    skipped = {tokenizer.token_id(word) for word in late.skipped_words}
    skipped = {tokenizer.unknown_id if token is None else token for token in skipped}
    places = range(late.skips_first, len(encoded.ids))
    counted = tuple(at for at in places if encoded.ids[at] not in skipped)
    if not counted:
        raise invalid(f"{sent.param} has no token that gets a vector", sent.param, "empty_prompt")
    return {"positions": counted}


def vectors_item(result: InputResult) -> Json:
    """Return the vectors `[tokens, dimensions]`, of length 1."""
    [part] = result.parts
    if result.body.encoding_format == "base64":
        return {"vectors": base64.b64encode(part.output.data).decode(), "shape": list(part.output.shape)}
    return {"vectors": part.values}


def _prefix(body: EncodeBody, late: LateInteraction) -> str:
    return late.query_prefix if body.input_type == "query" else late.document_prefix


def _can_leave_unread(served: ServedModel, late: LateInteraction) -> bool:
    """Whether tokens that no other token attends to can be computed: no position biases, no window inside a query."""
    encoder = served.config.encoder
    if encoder is None:
        return False
    mixers = [layer.attention for layer in encoder.layers]
    plain = all(mixer.position is None or isinstance(mixer.position, RotaryConfig) for mixer in mixers)
    return plain and all(mixer.window is None or mixer.window >= (late.query_length or 0) for mixer in mixers)
