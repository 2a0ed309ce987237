"""Tokenizers from files older than tokenizer.json, compared with `transformers` for the same files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import processors
from transformers.convert_slow_tokenizer import DebertaV2Converter

from tests.checkpoints import byte_level_bpe
from tests.model.tokenizer_folders import (
    FOLDERS,
    NLLB_LANGUAGES,
    marian_apart,
    strings,
    write_folder,
    write_nllb,
)
from triptych.model.errors import ConfigError
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

FIRST_SPACE = re.compile("(^|</?s>|<unk>)[ \u2581]")
_LEFT_OUT = {"marian", "m2m-100", "siglip"}  # they strip whole texts, which streamed texts cannot do


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as root:
        yield Path(root)


@cache
def made(root: Path, name: str) -> Path:
    return write_folder(name, root / name)


def pair(root: Path, name: str) -> tuple[Tokenizer, Any]:
    """Return our tokenizer and that of `transformers`."""
    ours = Tokenizer.from_folder(made(root, name))
    assert ours is not None
    if name == "deberta-v2":
        return ours, converted(made(root, name))
    return ours, transformers.AutoTokenizer.from_pretrained(made(root, name))


def converted(folder: Path) -> Any:
    """Convert as for published tokenizer.json files; transformers 5.23 leaves out the normalisation of spm.model."""
    pieces = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    old = SimpleNamespace(
        vocab_file=str(folder / "spm.model"),
        do_lower_case=False,
        split_by_punct=False,
        convert_tokens_to_ids=list(pieces.values()).index,
    )
    made = DebertaV2Converter(old).converted()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": piece for name, piece in pieces.items()}
    )


def texts_for(name: str, count: int) -> list[str]:
    """Return texts without a first space, which `transformers` reads differently than SentencePiece's own library."""
    found = [*strings(count), "", " ", "\n"]
    if name == "siglip":  # a space follows a special token there only as the text has it
        return [text for text in found if not re.search("</?s>|<unk>|<pad>", text)]
    return [text for text in found if not (name.startswith("llama") and FIRST_SPACE.search(text))]


def compare(root: Path, name: str, count: int) -> None:
    ours, reference = pair(root, name)
    all_texts = texts_for(name, count)
    if name == "marian":
        all_texts[::9] = [(">>xx<< ", ">>fr<<")[len(text) % 2] + text for text in all_texts[::9]]
    assert len(reference) == ours.vocab_size
    for text, encoded in zip(all_texts, ours.encode_batch(all_texts), strict=True):
        expected = reference(text).input_ids
        if name == "byt5" and text.rstrip().endswith("</s>"):
            expected = [*expected, expected[-1]]  # the library adds none here, and warns that it will
        assert list(encoded.ids) == expected, repr(text)
        shown = reference.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = ours.decode(expected)
        assert (found.strip() if name in _LEFT_OUT else found) == shown, repr(text)
        streamed = Detokenizer(ours)
        parts = [streamed.push([token]) for token in expected]
        assert "".join(parts) + streamed.push([], final=True) == found, repr(text)


_BY_TRANSFORMERS = [name for name in FOLDERS if name != "llama-joined"]


@pytest.mark.parametrize("name", _BY_TRANSFORMERS)
def test_ids_and_texts_are_transformers(root: Path, name: str) -> None:
    compare(root, name, 250)


def test_robertas_mask_takes_the_space_before_it_as_in_published_files(root: Path) -> None:
    """`transformers` 5 leaves the space to the text where no file tells."""
    ours = Tokenizer.from_folder(made(root, "roberta"))
    assert ours is not None
    plain, ends = ours.encode("a").ids, ours.encode("").ids
    mask = ours.special_token_id("<mask>")
    assert ours.encode("a <mask>").ids == (*plain[:-1], mask, ends[-1])


@pytest.mark.parametrize("name", ["llama", "llama-legacy", "llama-joined", "gemma"])
def test_spaces_are_those_of_sentencepieces_own_library(root: Path, name: str) -> None:
    folder = made(root, name)
    ours = Tokenizer.from_folder(folder)
    assert ours is not None
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = [*strings(400), " Hello", "  Hello", "   a   b  ", "\u2581Hello", " \n x", "", " ", "  "]
    # `tokenizers` maps a cluster of characters below six bytes by its first character, and loses the others.
    left_out = re.compile("</?s>|<unk>|<pad>|<mask>|<0x41>|[\x80-\u07ff]\u200d")
    for text in (text for text in texts if not left_out.search(text)):
        expected = library.encode(text)
        assert list(ours.encode(text, add_special_tokens=False).ids) == expected, repr(text)
        assert ours.decode(expected) == library.decode(expected), repr(text)
    plain, spaced = (ours.encode(text, add_special_tokens=False).ids for text in ("the", " the"))
    assert name == "gemma" or len(spaced) - len(plain) == (name != "llama-joined")


def test_runs_of_spaces_of_equal_scores_grow_from_their_beginning(root: Path, tmp_path: Path) -> None:
    """Runs of spaces in Mistral's models all have one score, and some lengths are missing."""
    source = (made(root, "llama") / "tokenizer.model").read_bytes()
    model = sentencepiece_model_pb2.ModelProto.FromString(source)
    for length in (2, 3, 4, 5, 6, 8):
        model.pieces.add(piece="\u2581" * length, score=-1e9)
    known = [piece for piece in model.pieces if set(piece.piece) == {"\u2581"}]
    for piece in known:
        piece.score = -1e9
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    ours = Tokenizer.from_folder(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ours is not None
    for count in range(30):
        for text in (" " * count, f"a{' ' * count}b"):
            assert list(ours.encode(text, add_special_tokens=False).ids) == library.encode(text), repr(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", _BY_TRANSFORMERS)
def test_ids_and_texts_of_ten_thousand_strings(root: Path, name: str) -> None:
    compare(root, name, 10_000)


# Two take no pairs; transformers 5.23 separates DeBERTa's twice.
_OTHER_PAIRS = {"marian", "m2m-100", "deberta", "llama-joined"}


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in _OTHER_PAIRS])
def test_pairs_are_transformers(root: Path, name: str) -> None:
    ours, reference = pair(root, name)
    # The library takes an empty second text for none; and as in `compare`.
    found = [text for text in texts_for(name, 80) if text and not text.rstrip().endswith("</s>")][:60]
    for text, other in zip(found[::2], found[1::2], strict=True):
        encoded, expected = ours.encode(text, other), reference(text, other, return_token_type_ids=True)
        assert list(encoded.ids) == expected.input_ids, repr((text, other))
        assert list(encoded.type_ids) == expected.token_type_ids


def test_bytes_that_are_no_character_are_left_out(root: Path) -> None:
    ours, reference = pair(root, "byt5")
    chance = random.Random(0)
    for size in range(1, 200):
        ids = [chance.choice((chance.randrange(3, 259), *ours.encode("ä好😀 a").ids)) for _ in range(size)]
        expected = reference.decode(ids, skip_special_tokens=True)
        streamed = Detokenizer(ours)
        parts = [streamed.push([token]) for token in ids]
        assert ours.decode(ids) == "".join(parts) + streamed.push([], final=True) == expected


def test_a_pair_of_the_first_deberta_is_separated_once(root: Path) -> None:
    tokenizer = Tokenizer.from_folder(made(root, "deberta"))
    assert tokenizer is not None
    first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a cat", "a dog"))
    both = tokenizer.encode("a cat", "a dog")
    assert both.ids == (1, *first, 2, *second, 2)
    assert both.type_ids == (0,) * (len(first) + 2) + (1,) * (len(second) + 1)


def test_nllbs_languages_stand_behind_the_pieces_and_the_mask_behind_them(tmp_path: Path) -> None:
    """The published embeddings have this order; `transformers` now gives other ids without tokenizer.json."""
    tokenizer = Tokenizer.from_folder(write_nllb(tmp_path / "nllb"))
    assert tokenizer is not None
    size = tokenizer.vocab_size
    assert [tokenizer.special_token_id(name) for name in (*NLLB_LANGUAGES, "<mask>")] == list(range(size - 4, size))
    ids = tokenizer.encode("Grüße  aus Köln").ids
    assert (ids[0], ids[-1]) == (size - 2, 2) and tokenizer.decode(ids) == "Grüße aus Köln"
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "nllb")
    for text in strings(300):
        if not any(name in text for name in (*NLLB_LANGUAGES, "<mask>")):
            assert list(tokenizer.encode(text).ids[1:]) == library(text).input_ids[1:], repr(text)


LANGUAGES = {"mbart": "ro_RO", "mbart-50": "gl_ES", "m2m-100": "de"}
LEGACY = {"legacy_behaviour": True}


def sources(folder: Path, code: str, count: int) -> None:
    """Compare sources in the language `code`, and in the folder's, with the reference library's."""
    ours, reference = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours is not None and ours.source_languages is not None
    token = ours.source_languages.token(code)
    assert token == ours.special_token_id(code if len(code) > 2 else f"__{code}__")
    texts = [*strings(count), ""]
    encoded = [ours.encode(text).ids for text in texts]
    assert [list(ids) for ids in encoded] == [reference(text).input_ids for text in texts]
    assert token is not None
    reference.src_lang = code
    marked = [list(ours.source_languages.mark(ids, token)) for ids in encoded]
    assert marked == [reference(text).input_ids for text in texts]


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_source_is_marked_with_any_language(root: Path, name: str) -> None:
    sources(made(root, name), LANGUAGES[name], 100)


def test_the_languages_of_wmt21_follow_the_vocabulary(tmp_path: Path) -> None:
    """Its models have fewer than M2M-100, whose tokenizer they use, and so other ids (facebook/wmt21-dense-24-wide)."""
    folder, codes = write_folder("m2m-100", tmp_path / "model"), ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"]
    tokens = {"additional_special_tokens": [f"__{code}__" for code in codes]}
    settings = {"tokenizer_class": "M2M100Tokenizer", "language_codes": "wmt21", "src_lang": "is", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sources(folder, "ha", 50)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None and tokenizer.source_languages is not None
    assert tokenizer.source_languages.codes == codes


@pytest.mark.parametrize(("name", "settings"), [("mbart", {}), ("mbart-50", {}), ("nllb", {}), ("nllb", LEGACY)])
def test_tokenizer_json_has_the_template_of_its_class(
    root: Path, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Published ones have others, which the library replaces."""
    files = write_nllb(tmp_path / name) if name == "nllb" else made(root, name)
    folder = tmp_path / "json"
    transformers.AutoTokenizer.from_pretrained(files).save_pretrained(folder)
    settings = {**json.loads((folder / "tokenizer_config.json").read_text()), **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["post_processor"]["single"] = raw["post_processor"]["single"][::-1]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    sources(folder, LANGUAGES.get(name, "ace_Arab"), 50)


def test_a_tokenizer_json_without_the_languages_keeps_its_template(root: Path, tmp_path: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(made(root, "xlm-roberta"))
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.source_languages is None
    assert list(tokenizer.encode("Grüße aus Köln").ids) == reference("Grüße aus Köln").input_ids
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer", "src_lang": "deu_Latn"}')
    with pytest.raises(ConfigError, match="src_lang 'deu_Latn' is no language of its tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_other_tokenizers_mark_no_language(root: Path) -> None:
    for name in ("marian", "t5", "bart", "xlm-roberta"):
        tokenizer = Tokenizer.from_folder(made(root, name))
        assert tokenizer is not None and tokenizer.source_languages is None


def test_marian_with_two_vocabularies_reads_one_and_writes_the_other(tmp_path: Path) -> None:
    write_folder("marian", tmp_path / "model")
    marian_apart(tmp_path / "model")
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.from_folder(tmp_path / "model")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert ours is not None
    names = json.loads((tmp_path / "model" / "target_vocab.json").read_text())
    for text in [*strings(150), ">>fr<< Good morning", ""]:
        assert list(ours.encode(text).ids) == reference(text).input_ids, repr(text)
        target = [token for token in reference(text_target=text).input_ids if token > 1]
        assert ours.decode([*target, 0]).strip() == reference.decode(target, skip_special_tokens=True), repr(text)
    assert ours.vocab_size == len(names) and ours.token_id("<pad>") == names["<pad>"]
    (tmp_path / "model" / "target_vocab.json").unlink()
    with pytest.raises(ConfigError, match=r"its tokenizer needs target_vocab\.json"):
        Tokenizer.from_folder(tmp_path / "model")


TWICE = b"\x0a\x09\x0a\x05<unk>\x18\x02" + 2 * b"\x0a\x03\x0a\x01a"  # a SentencePiece model that has a piece twice


def spoiled(root: Path, name: str, into: Path) -> Path:
    folder = into / name
    folder.mkdir()
    for file in made(root, name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("t5", "spiece.model", b"not a model", r"t5: spiece\.model is not a SentencePiece model"),
        ("t5", "spiece.model", b"", r"t5: spiece\.model is empty: copy or download it again"),
        ("marian", "source.spm", b"\x0a\xff\xff", r"source\.spm is not a SentencePiece model"),
        ("marian", "source.spm", TWICE, "marian: its tokenizer cannot be built: .*already defined"),
        ("marian", "vocab.json", b"[]", r"vocab\.json must hold an object, found list"),
        ("marian", "vocab.json", b'{"a": 0}', r"vocab\.json has no <unk>"),
        ("m2m-100", "tokenizer_config.json", b'{"src_lang": "xx"}', "src_lang 'xx' is no language"),
        ("mbart", "tokenizer_config.json", b'{"src_lang": "xx"}', "src_lang 'xx' is no language"),
        ("m2m-100", "tokenizer_config.json", b'{"language_codes": "x"}', "'x' is not served; served are m2m100, wmt21"),
        ("marian", "tokenizer_config.json", b'{"sp_model_kwargs": {"alpha": 1}}', "sp_model_kwargs must be empty"),
        ("siglip", "tokenizer_config.json", b'{"sp_model_kwargs": {"alpha": 1}}', "sp_model_kwargs must be empty"),
        ("gpt2", "merges.txt", b"a b c\n", r"merges\.txt must have two tokens in a line"),
        ("gpt2", "merges.txt", b"q qqqq\n", r"vocab\.json and merges\.txt do not fit"),
        ("gpt2", "vocab.json", b'{"a": "b"}', r"vocab\.json must map tokens to ids"),
        ("bert", "vocab.txt", b"\xff\xfe", r"vocab\.txt is not UTF-8"),
        ("bert", "tokenizer_config.json", b'{"tokenizer_class": "CTRLTokenizer"}', "of class 'CTRL' needs tokenizer"),
        ("bert", "tokenizer_config.json", b"{", r"tokenizer_config\.json is not valid JSON"),
        ("bert", "tokenizer_config.json", rb'{"eos_token": "\ud800"}', r"_config\.json is not valid JSON: .*ud800"),
        ("bert", "tokenizer_config.json", rb'{"a": "\\ud83d\ude00"}', r"_config\.json is not valid JSON: .*ude00"),
        ("llama", "config.json", b'{"model_type": "new"}', None),
    ],
)
def test_damaged_files_are_named(
    root: Path, name: str, file: str, content: bytes, message: str | None, tmp_path: Path
) -> None:
    folder = spoiled(root, name, tmp_path)
    (folder / file).write_bytes(content)
    if message is None:  # the model's type or the tokenizer's class still tells
        assert Tokenizer.from_folder(folder) is not None
        return
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(folder)


def test_spaces_that_do_not_begin_pieces_are_refused(root: Path, tmp_path: Path) -> None:
    folder = spoiled(root, "t5", tmp_path)
    data = (folder / "spiece.model").read_bytes()
    for part, setting, value in (
        ("trainer_spec", "treat_whitespace_as_suffix", True),
        ("normalizer_spec", "escape_whitespaces", False),
    ):
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(data)
        setattr(getattr(model, part), setting, value)
        (folder / "spiece.model").write_bytes(model.SerializeToString())
        with pytest.raises(ConfigError, match=rf"spiece\.model: {setting} {str(value).lower()} is not served; add"):
            Tokenizer.from_folder(folder)


def test_a_class_that_is_not_known_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    folder = spoiled(root, "bert", tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    (folder / "config.json").write_text('{"model_type": "ctrl"}')
    with pytest.raises(ConfigError, match=r"of class 'CTRL' needs tokenizer\.json; built from other files are"):
        Tokenizer.from_folder(folder)


def test_a_named_class_is_not_replaced_by_that_of_the_models_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    assert Tokenizer.from_folder(tmp_path) is not None
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    with pytest.raises(ConfigError, match="'BertJapanese' needs tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_file_is_named(root: Path, tmp_path: Path) -> None:
    folder = spoiled(root, "marian", tmp_path)
    (folder / "source.spm").unlink()
    with pytest.raises(ConfigError, match=r"marian: its tokenizer needs source\.spm"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_any_of_the_files_takes_ids_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("begins", [True, False])
def test_an_embedder_ends_texts_as_its_settings_say_and_its_tokenizer_does_not(begins: bool, tmp_path: Path) -> None:
    """e5-mistral is published so; transformers 5 leaves out the token whose vector is the text's."""
    raw = byte_level_bpe(vocab_size=320)
    raw.add_special_tokens(["</s>"])
    if not begins:
        raw.post_processor = processors.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    begin, end, plain = raw.token_to_id("<s>"), raw.token_to_id("</s>"), raw.encode("import os").ids
    settings = {"add_eos_token": True, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for embeds in (False, True):
        if embeds:
            (tmp_path / "modules.json").write_text("[]")
        ours = Tokenizer.from_folder(tmp_path)
        assert ours is not None
        assert ours.encode("import os").ids == ((*plain, end) if embeds else tuple(plain))
        assert ours.encode("import os", add_special_tokens=False).ids == tuple(plain[begins:])
    pair = (*plain, end, *([begin] if begins else []), *plain[begins:], end)
    assert ours.encode("import os", "import os").ids == pair
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path).encode("import os").ids == tuple(plain)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "of two words"}))
    with pytest.raises(ConfigError, match="its tokenizer cannot be used: "):
        Tokenizer.from_folder(tmp_path)
