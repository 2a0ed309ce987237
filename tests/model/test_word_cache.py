"""Tokens looked up by words are those that the library gives for the whole text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.model.tokenizer_folders import strings, write_folder
from triptych.model.pretrained import embedded_models
from triptych.model.text import tokenizer as ours
from triptych.model.text import word_cache
from triptych.model.text.word_cache import WordCache

VOCABULARY = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "##b": 5, "c": 6}


def tokenizer(**parts: object) -> Tokenizer:
    made = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def check(cache: WordCache, library: Tokenizer, text: str, pair: str | None = None) -> bool:
    """Return whether the cache has a text's words; if so, compare its tokens with the library's."""
    found = cache.encode(text, pair)
    if found is not None:
        expected = library.encode(text, pair)
        assert (list(found[0]), list(found[1])) == (expected.ids, expected.type_ids), repr((text, pair))
    return found is not None


@pytest.mark.parametrize("name", ["bert", "bert-cased", "embed"])
def test_texts_and_pairs_have_the_librarys_tokens(name: str, tmp_path: Path) -> None:
    folder = Path(embedded_models()[name]) if name == "embed" else write_folder(name, tmp_path / name)
    read = ours.Tokenizer.from_folder(folder)
    assert read is not None and read._words is not None
    texts = [*strings(1_200), "", " ", "  ", "a\nb c", " a", "a ", "\u0301 \u0301a", "\u00b4 a\u00b4 \u1fef"]
    found = [check(read._words, read._tokenizer, text) for _ in range(2) for text in texts]
    assert sum(found) > len(found) / 3
    paired = [check(read._words, read._tokenizer, one, two) for one, two in pairwise(texts)]
    assert sum(paired) > len(paired) / 4


@pytest.mark.parametrize(
    "processor",
    [
        None,
        processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
        processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
        processors.TemplateProcessing("$A [SEP]", "[SEP] $A [CLS] [SEP]:1 $B:3", [("[CLS]", 1), ("[SEP]", 2)]),
    ],
)
def test_special_tokens_and_types_are_the_processors(processor: processors.PostProcessor | None) -> None:
    library = tokenizer(**({} if processor is None else {"post_processor": processor}))
    cache = WordCache.of(library)
    assert cache is not None
    for text, pair in (("a ab c", None), ("a ab b-c", None), ("", None), ("", "c"), ("c a", "ab b"), ("ab", "")):
        assert check(cache, library, text, pair) or check(cache, library, text, pair)


def with_added(content: str, **flags: bool) -> Tokenizer:
    made = tokenizer(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    made.add_special_tokens([AddedToken(content, **flags)])
    return made


@pytest.mark.parametrize("flags", [{}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_added_tokens_are_found_inside_words_and_beside_spaces(flags: dict[str, bool]) -> None:
    library = with_added("<m>", **flags)
    cache = WordCache.of(library)
    assert cache is not None
    texts = ("a <m> b", "a<m>b", "<m>", " <m>  <m> a", "<M> a", "a <m>b")
    for text in texts:
        assert check(cache, library, text) or check(cache, library, text)


@pytest.mark.parametrize(
    "library",
    [
        with_added("two words"),
        with_added("two\u2003words", normalized=True),  # NFKC makes it a space
        with_added("acute\u00b4", normalized=True),
        tokenizer(pre_tokenizer=pre_tokenizers.ByteLevel()),
        tokenizer(pre_tokenizer=pre_tokenizers.Metaspace()),
        tokenizer(normalizer=normalizers.Replace(" a", "b")),
        tokenizer(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("a ")])),
        Tokenizer(models.BPE(VOCABULARY, [])),
        tokenizer(post_processor=processors.TemplateProcessing("$A $A", "$A $B", [])),
        tokenizer(post_processor=processors.TemplateProcessing("$A", "$B $A", [])),
    ],
)
def test_a_tokenizer_whose_words_may_depend_on_each_other_has_no_cache(library: Tokenizer) -> None:
    assert WordCache.of(library) is None


def test_many_new_words_are_left_to_the_library_until_they_are_known() -> None:
    cache = WordCache.of(tokenizer())
    assert cache is not None
    text = " ".join(f"a{number}" for number in range(8))  # three are learnt at a time
    assert [cache.encode(text) is not None for _ in range(4)] == [False, False, True, True]
    assert cache.encode("b" * 40) is not None and len(cache._words) == 8  # too long for the cache
    assert cache.encode("a " * 10_000) is None


def test_the_number_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_WORDS", 10)
    library = tokenizer()
    cache = WordCache.of(library)
    assert cache is not None
    for number in range(200):
        assert check(cache, library, f"a{number % 37}")
        assert len(cache._words) <= 10
