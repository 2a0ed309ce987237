"""The bytes of tokens against the tokenizers' decoders, for all supported kinds of vocabulary."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.model.texts import CORPUS, bytes_tokenizer, words_tokenizer
from triptych.model.errors import ConfigError
from triptych.model.pretrained import embedded_models
from triptych.model.text.token_bytes import TokenBytes, token_bytes
from triptych.model.text.tokenizer import Tokenizer


def embedded(name: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        found = Tokenizer.from_folder(embedded_models()[name])
        assert found is not None
        return found

    return make


def pieces(split: pre_tokenizers.PreTokenizer) -> tuple[list[str], list[str]]:
    """Return characters of the corpus and longer pieces that begin words, the same in each run, unlike a trainer's."""
    words = sorted({word for text in CORPUS for word, _ in split.pre_tokenize_str(text)})
    begins = {word[:size] for word in words for size in (2, 3, 5) if size <= len(word)}
    return sorted(set("".join(words))), sorted(begins)


def word_piece() -> Tokenizer:
    split = pre_tokenizers.BertPreTokenizer()
    characters, longer = pieces(split)
    names = ["[UNK]", "[SEP]", *characters, *longer, *("##" + one for one in (*characters, *longer))]
    raw = tokenizers.Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    raw.pre_tokenizer = split
    raw.decoder = decoders.WordPiece()
    raw.add_special_tokens(["[UNK]", "[SEP]"])
    return Tokenizer(raw)


def word_level() -> Tokenizer:
    raw = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "bc": 2, "{": 3, "}": 4, "é": 5}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(raw)


def unigram() -> Tokenizer:
    split = pre_tokenizers.Metaspace()
    characters, longer = pieces(split)
    scored = [(piece, -8.0 + len(piece)) for piece in (*characters, *longer)]
    raw = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *scored], unk_id=0))
    raw.pre_tokenizer = split
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(raw)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama's: pieces, byte fallback, the first space removed."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁▁"]
    raw = tokenizers.Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.add_special_tokens(["<unk>", "</s>"])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw)


KINDS = {
    "code": embedded("code"),
    "normalize": embedded("normalize"),
    "bytes": bytes_tokenizer,
    "metaspace": words_tokenizer,
    "unigram": unigram,
    "word pieces": word_piece,
    "words": word_level,
    "byte fallback": byte_fallback,
}


def forms(make: Callable[[], Tokenizer], more: int = 5) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = make()
    return tokenizer, token_bytes(tokenizer, tokenizer.vocab_size + more)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_read_as_the_decoder_shows_them(kind: str) -> None:
    tokenizer, found = forms(KINDS[kind])
    known = [token for token, form in enumerate(found.later) if form and found.first[token]]
    draw, checked = random.Random(1), 0
    for _ in range(2_000):
        ids = draw.choices(known, k=draw.randint(1, 6))
        try:
            text = found.text(ids).decode()
        except UnicodeDecodeError:
            continue  # a part of a character, which a decoder shows in its own way
        checked += 1
        assert tokenizer.decode(ids) == text, ids
    assert checked > 300


@pytest.mark.parametrize("kind", ["code", "normalize", "bytes", "byte fallback"])
def test_parts_of_characters_are_known(kind: str) -> None:
    tokenizer, found = forms(KINDS[kind])
    for text in ("é", "東", "👍"):
        ids = tokenizer.encode("a" + text, add_special_tokens=False).ids
        assert found.text(ids).decode().endswith(text)
    assert any(len(form) == 1 and form[0] >= 0x80 for form in found.later)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_those_of_the_model_alone_read_nothing(kind: str) -> None:
    tokenizer, found = forms(KINDS[kind])
    names = tokenizer.token_names(tokenizer.vocab_size + 5)
    assert names[-5:] == [None] * 5
    assert len(found.first) == len(found.later) == len(names)
    assert all(not found.first[at] and not found.later[at] for at, name in enumerate(names) if name is None)
    assert token_bytes(tokenizer, tokenizer.vocab_size - 1).later == found.later[: tokenizer.vocab_size - 1]


def test_the_first_of_an_output_has_a_form_of_its_own() -> None:
    for kind, word, later in (("metaspace", "▁the", b" the"), ("words", "bc", b" bc"), ("byte fallback", "▁a", b" a")):
        tokenizer, found = forms(KINDS[kind])
        names = tokenizer.token_names(len(found.later))
        if word in names:
            token = names.index(word)
            assert (found.first[token], found.later[token]) == (later[1:], later)
    tokenizer, found = forms(KINDS["code"])
    assert found.first == found.later


def test_a_decoder_that_looks_ahead_is_refused() -> None:
    raw = tokenizers.Tokenizer(models.BPE({"a</w>": 0, "b": 1, "c</w>": 2}, []))
    raw.decoder = decoders.BPEDecoder()
    with pytest.raises(ConfigError, match="by what follows it"):
        token_bytes(Tokenizer(raw), 3)
