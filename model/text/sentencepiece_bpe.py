"""Tokenizers of sentencepiece models with BPE: Llama, Code Llama, Gemma and NLLB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triptych.model.errors import ConfigError
from triptych.model.text.sentencepiece_model import SPACE, Algorithm, Piece, PieceKind, SentencePieceModel
from triptych.model.text.sentencepiece_steps import (
    MAX_PIECE,
    SPACES,
    fairseq_first,
    metaspace,
    precompiled,
    set_normalizers,
    set_words,
)
from triptych.model.text.tokenizer_class import (
    Texts,
    put_begin_and_end,
    set_bpe,
    set_template,
)
from triptych.model.text.tokenizer_files import Files


def merges(pieces: Sequence[Piece], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that SentencePiece's BPE joins, in the order of the scores of what they become.

    Of equal scores, which Mistral's runs of spaces have, it joins the leftmost first: a run grows from its beginning.
    Pairs with a longer left half in front of others do the same.
    """
    found: list[tuple[float, int, int, int, int, str, str]] = []
    normal = [piece for piece in pieces if piece.kind is PieceKind.NORMAL]
    longest = max((len(piece.text) for piece in normal), default=0)
    if longest > MAX_PIECE:
        raise ConfigError(f"a piece of its SentencePiece model has {longest} characters; at most {MAX_PIECE} are read")
    for piece in normal:
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                found.append((-piece.score, -len(left), -len(right), ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def sentencepiece_bpe(model: SentencePieceModel, ids: dict[str, int], unknown: str) -> models.BPE:
    if model.algorithm is not Algorithm.BPE:
        raise ConfigError("its SentencePiece model must be of the type BPE")
    pairs = merges(model.pieces, ids)
    return models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def read_bpe(files: Files) -> models.BPE:
    model = files.sentencepiece
    try:
        return sentencepiece_bpe(model, {piece.text: token for token, piece in enumerate(model.pieces)}, "<unk>")
    except ConfigError as error:
        raise ConfigError(f"{files.folder.name}: {error}") from None


def set_llama_steps(tokenizer: Tokenizer, *, scheme: str, strip: bool, before: Sequence[Any] = ()) -> None:
    """Let spaces be marks of pieces; `strip` takes the first one off an output."""
    set_normalizers(tokenizer, *before)
    tokenizer.pre_tokenizer = metaspace(scheme)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strip else steps)


def dress_llama(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    """Llama's: a space in front of a text; `legacy` puts one after every special token too.

    What a SentencePiece model says of spaces and characters holds, as in its own library.
    """
    if files.loaded is not None:
        set_bpe(tokenizer, fuse_unk=True, byte_fallback=True)
    model = files.sentencepiece if files.loaded is None else SentencePieceModel(remove_extra_whitespaces=False)
    prefix = files.flag("add_prefix_space", model.add_dummy_prefix)
    scheme = ("always" if files.flag("legacy", False) else "first") if prefix else "never"
    before = precompiled(charsmap) if files.loaded is None else []
    if model.remove_extra_whitespaces:
        before += [normalizers.Replace(Regex(" +$" if prefix else "^ +| +$"), ""), SPACES]
    set_llama_steps(tokenizer, scheme=scheme, strip=prefix, before=before)
    if model.remove_extra_whitespaces:  # the first space of a text is the one in front of it
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)


def dress_code_llama(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    if files.loaded is not None:
        set_bpe(tokenizer, fuse_unk=True, byte_fallback=True, unk_token=files.special("unk_token", "<unk>"))
    set_llama_steps(tokenizer, scheme="first" if files.flag("add_prefix_space", True) else "never", strip=True)


def dress_gemma(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    if files.loaded is not None:
        set_bpe(tokenizer, fuse_unk=True, byte_fallback=True, unk_token=files.special("unk_token", "<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def dress_siglip2(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    """Read texts as Gemma does, in lower case, which the model was trained on and older files do not say."""
    dress_gemma(tokenizer, files, charsmap)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", SPACE)])


def around_llama(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put begin and end around texts; what tokenizer.json puts there stays."""
    if files.loaded is None:
        put_begin_and_end(tokenizer, files, texts, begins=True)


def around_code_llama(tokenizer: Tokenizer, files: Files, texts: Texts) -> None:
    """Put a begin token in front of texts, whatever tokenizer.json puts there."""
    if files.loaded is None:
        put_begin_and_end(tokenizer, files, texts, begins=True)
    elif begin := texts.get("bos_token"):
        set_template(tokenizer, f"{begin}:0 $A:0", f"{begin}:0 $A:0 {begin}:1 $B:1", [begin])


def read_nllb(files: Files) -> models.BPE:
    """Read NLLB's pieces in fairseq's order, the languages and the mask after them, as published."""
    first = fairseq_first(files)
    ids = {text: place for place, text in enumerate(first)}
    for piece in files.sentencepiece.pieces:
        ids.setdefault(piece.text, len(ids))
    languages = files.special_tokens.extra
    if not languages:
        raise ConfigError(f"{files.folder.name}: additional_special_tokens must list NLLB's languages")
    for token in (*languages, files.special("mask_token", "<mask>")):
        ids.setdefault(str(token), len(ids))
    return sentencepiece_bpe(files.sentencepiece, ids, first[3])


def dress_nllb(tokenizer: Tokenizer, files: Files, charsmap: bytes) -> None:
    if files.loaded is not None:
        set_bpe(tokenizer, fuse_unk=True, unk_token=files.special("unk_token", "<unk>"))
    if charsmap or files.loaded is None:
        set_normalizers(tokenizer, *precompiled(charsmap), SPACES)
    set_words(tokenizer, words=False)
