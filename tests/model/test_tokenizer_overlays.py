"""Settings in a folder's other files change its tokenizer.json as in `transformers`."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers.models.auto import tokenization_auto

from tests.checkpoints import byte_level_bpe
from tests.model.tokenizer_folders import strings, write_folder
from triptych.model.errors import ConfigError, TokenizerError
from triptych.model.text import tokenizer_class
from triptych.model.text.decoders import StreamCleaner, clean_up
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.piece_tokenizers import PIECE_CLASSES
from triptych.model.text.tokenizer import Tokenizer
from triptych.model.text.tokenizer_builder import CLASSES, named_texts
from triptych.model.text.tokenizer_class import HARMLESS, SERVED, class_over_json
from triptych.model.text.tokenizer_files import Files

_MARKS = ("<|im_start|>", "<|im_end|>")
_TEXTS = [*strings(40), "<|im_start|>user\nHi <|im_end|>x", " <new> x<new>y ", "Ünïcödé ÀÉ 中文", "I do n ' t ."]
_TEXTS.append("it 's . ok , n't ! ' x")


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


@cache
def saved(root: Path, name: str) -> Path:
    """Return a folder with tokenizer.json, as the library saves it; "plain" has a class that changes nothing."""
    folder = root / name
    if name == "plain":
        raw = byte_level_bpe(vocab_size=400)
        transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<s>").save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        return folder
    files = write_folder(name, root / f"{name}-files")
    transformers.AutoTokenizer.from_pretrained(files).save_pretrained(folder)
    (folder / "config.json").write_bytes((files / "config.json").read_bytes())
    return folder


def laid_over(source: Path, folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    """Copy the folder with these settings, without those that are "-", and with these files."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    whole = json.loads((folder / "tokenizer_config.json").read_text()) | settings
    kept = {name: value for name, value in whole.items() if value != "-"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def equal(folder: Path) -> Tokenizer:
    """Compare ids, texts, streamed texts and special tokens with the library's."""
    ours, reference = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    assert ours.vocab_size == len(reference)
    assert named_texts(Files(folder)) == reference.special_tokens_map  # which chat templates get
    known = reference.backend_tokenizer.get_added_tokens_decoder()
    assert ours.special_ids == {token for token, added in known.items() if added.special}
    for text in _TEXTS:
        expected = reference(text).input_ids
        assert list(ours.encode(text).ids) == expected, repr(text)
        shown = ours.decode(expected)
        assert shown == reference.decode(expected, skip_special_tokens=True), repr(text)
        streamed = Detokenizer(ours)
        assert "".join(streamed.push([token]) for token in expected) + streamed.push([], final=True) == shown
    return ours


def _token(text: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": special, **flags}


def overlays(size: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return settings of tokenizer_config.json and other files by name."""
    first, last = _MARKS
    decoder = {str(size): _token(first), str(size + 1): _token(last), str(size + 2): _token("<new>", special=False)}
    none = {"added_tokens_decoder": "-", "extra_special_tokens": "-"}
    older = {"eos_token": _token(last), "additional_special_tokens": [first], "pad_token": "<new>"}
    return {
        "added_tokens_decoder": ({"added_tokens_decoder": decoder, "eos_token": last}, {}),
        "extra list": ({"extra_special_tokens": [*_MARKS, "<new>"]}, {}),
        "extra object": ({"extra_special_tokens": {"image_token": first, "video_token": "<new>"}}, {}),
        "model's own": ({"model_specific_special_tokens": {"image_token": first, "video_token": "<new>"}}, {}),
        "older name": (none | {"additional_special_tokens": [*_MARKS]}, {}),
        "names": ({"eos_token": last, "pad_token": "<new>", "image_token": first}, {}),
        "token map": (none | {"eos_token": "<new>"}, {"special_tokens_map": older}),
        "added_tokens.json": (none | {"eos_token": last}, {"added_tokens": {last: size, "<new>": size + 1}}),
        "split": ({"extra_special_tokens": [*_MARKS], "split_special_tokens": True}, {}),
        "other ids": ({"added_tokens_decoder": {str(size + 7): _token(first), "3": _token("<new>")}}, {}),
    }


@pytest.mark.parametrize("overlay", overlays(0))
@pytest.mark.parametrize("name", ["plain", "bert", "gpt2", "xlm-roberta", "gemma"])
def test_tokens_that_stand_only_in_other_files_are_the_references(
    name: str, overlay: str, root: Path, tmp_path: Path
) -> None:
    source = saved(root, name)
    size = RawTokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
    settings, files = overlays(size)[overlay]
    equal(laid_over(source, tmp_path / "model", settings, **files))


def test_a_chat_models_marks_are_read_and_end_an_output(root: Path, tmp_path: Path) -> None:
    folder = laid_over(saved(root, "plain"), tmp_path / "model", {"extra_special_tokens": [*_MARKS]})
    ours = equal(folder)
    found = [ours.special_token_id(mark) for mark in _MARKS]
    assert found == [ours.vocab_size - 2, ours.vocab_size - 1] and set(found) <= ours.special_ids
    assert ours.encode("<|im_start|>user<|im_end|>", add_special_tokens=False).ids[0] == found[0]


_FOR_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_OVERRIDES: list[tuple[str, dict[str, Any]]] = [
    *(("bert", {name: value}) for name in ("do_lower_case", "tokenize_chinese_chars") for value in (True, False)),
    *(("bert", {"do_lower_case": False, "strip_accents": value}) for value in (True, False, None)),
    ("bert", {"do_lower_case": "-"}),
    ("mpnet", {"do_lower_case": False}),
    ("funnel", {"strip_accents": False}),
    ("albert", {"do_lower_case": False, "keep_accents": True}),
    ("xlnet", {"do_lower_case": True}),
    *((name, {"add_prefix_space": True}) for name in ("gpt2", "roberta", "blenderbot", "whisper", "qwen2")),
    *((name, {"add_prefix_space": False}) for name in ("albert", "xlm-roberta", "camembert", "gpt-neox", "clip")),
    *((name, {"add_bos_token": True, "add_eos_token": True}) for name in ("gpt2", "gemma", "plain")),
    *((name, {"clean_up_tokenization_spaces": True}) for name in ("t5", "bert", "mbart", "gpt2")),
    ("gpt2", {"clean_up_tokenization_spaces": True, _FOR_BPE: True}),
    ("whisper", {"language": "zh", "task": "translate", "predict_timestamps": True}),
    ("mbart", {"src_lang": "fr_XX"}),
    ("pegasus", {}),
    ("cohere", {}),
    ("starcoder2", {}),
    ("qwen2", {"cls_token": {"__type": "AddedToken", **_token("Hi", special=False), "rstrip": True}}),
    ("qwen2", {"extra_special_tokens": [{"__type": "AddedToken", **_token("<new>", special=False), "lstrip": True}]}),
]


@pytest.mark.parametrize(("name", "settings"), _OVERRIDES, ids=lambda value: str(value)[:40])
def test_settings_do_beside_tokenizer_json_what_the_class_does(
    name: str, settings: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    equal(laid_over(saved(root, name), tmp_path / "model", settings))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {"extra_special_tokens": value}) for name in ("gemma", "mbart", "xlnet") for value in ({}, None)),
        ("albert", {"add_bos_token": False}),
        ("albert", {"add_eos_token": True}),
        ("marian", {"added_tokens_decoder": {0: _token("<new>", special=False), 1: _token("[x]")}}),  # after the last
        *((name, {"split_special_tokens": True}) for name in ("marian", "m2m-100", "byt5")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_of_a_folder_without_tokenizer_json_are_the_references(
    name: str, settings: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    files = root / f"{name}-files"
    source = files if files.exists() else write_folder(name, files)
    if added := settings.get("added_tokens_decoder"):
        size = len(json.loads((source / "vocab.json").read_text()))
        settings = {"added_tokens_decoder": {str(size + place): token for place, token in added.items()}}
    folder = laid_over(source, tmp_path / "model", settings)
    equal_ids(folder, every_token=name != "marian")


@pytest.mark.parametrize("name", ["mbart", "t5", "xlnet"])
def test_an_older_list_of_tokens_does_not_replace_those_of_sentencepiece(name: str, root: Path, tmp_path: Path) -> None:
    files = root / f"{name}-files"
    source = files if files.exists() else write_folder(name, files)
    token_map = {"additional_special_tokens": ["import", "<new>"]}
    equal_ids(laid_over(source, tmp_path / "model", {}, special_tokens_map=token_map))


def equal_ids(folder: Path, *, every_token: bool = True) -> None:
    """Compare ids with the library's, and each token's text between two others."""
    ours, reference = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for text in (*(text for text in _TEXTS if "  " not in text), "the end</s> of <new> it[x]y"):
        assert list(ours.encode(text).ids) == reference(text).input_ids, repr(text)
    for token in range(ours.vocab_size if every_token else 0):
        assert ours.decode([9, token, 9]) == reference.decode([9, token, 9], skip_special_tokens=True)


def test_an_end_that_the_pieces_lack_is_named(root: Path, tmp_path: Path) -> None:
    folder = laid_over(write_folder("marian", tmp_path / "files"), tmp_path / "model", {"eos_token": "<end>"})
    with pytest.raises(ConfigError, match="eos_token '<end>' is not in vocab"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("named", "model_type", "expected"),
    [
        ("LlamaTokenizer", "llama", ""),  # its tokenizer.json is byte-level
        ("GPT2Tokenizer", "granite", ""),
        ("GPT2TokenizerFast", "smollm3", "GPT2"),
        ("LlamaTokenizerFast", "qwen2", "Qwen2"),
        ("ElectraTokenizer", "electra", "Bert"),
        ("Qwen3Tokenizer", "qwen3", ""),
        ("PreTrainedTokenizerFast", "bert", ""),
        ("", "bert", "Bert"),
        ("", "falcon", ""),
    ],
)
def test_the_class_is_the_references(named: str, model_type: str, expected: str, root: Path, tmp_path: Path) -> None:
    settings = {"tokenizer_class": named or "-"}
    folder = laid_over(saved(root, "plain"), tmp_path / "model", settings, config={"model_type": model_type})
    assert class_over_json(Files(folder)) == expected
    if expected != "Bert":
        equal(folder)


def test_types_and_classes_are_the_installed_ones() -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for model_type, name in names.items():
        made = tokenization_auto.tokenizer_class_from_name(name) if name else None
        known = tokenizer_class._BY_TYPE.get(model_type, "")
        if made is transformers.PreTrainedTokenizerFast:
            assert model_type in tokenizer_class._AS_WRITTEN and not known, model_type
        elif made is not None:
            own = made.__name__.removesuffix("Tokenizer")
            own = tokenizer_class._ALIASES.get(own, own)
            assert known == (own if own in tokenizer_class._TYPES else ""), model_type
    forced = {name for name in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if name in names}
    assert {name for name in forced if name in tokenizer_class._BY_TYPE} == tokenizer_class._FORCED
    for alias, name in tokenizer_class._ALIASES.items():
        found = tokenization_auto.tokenizer_class_from_name(f"{alias}Tokenizer")
        own = found.__name__.removesuffix("Tokenizer") if found is not None else ""
        assert own in (name, alias), alias


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"Esm", "Siglip"}))  # they are written in Python
def test_every_parameter_of_a_class_is_served_or_harmless(name: str) -> None:
    made = tokenization_auto.tokenizer_class_from_name(f"{name}Tokenizer")
    taken = {
        parameter
        for one in made.__mro__[: made.__mro__.index(transformers.PreTrainedTokenizerFast)]
        for parameter in inspect.signature(one.__init__).parameters
        if not parameter.endswith("_token") and parameter not in ("self", "args", "kwargs")
    }
    # A mark that is read by its name, one that is ## in every published folder, and one that XLNet's class ignores.
    other = {"mask_token_sent", "wordpieces_prefix"} | ({"keep_accents"} if name == "XLNet" else set())
    assert taken <= CLASSES[name].settings | SERVED | HARMLESS | other
    assert CLASSES[name].settings <= taken


@pytest.mark.parametrize("name", sorted({*PIECE_CLASSES, "Esm", "Siglip"}))
def test_every_parameter_of_a_class_in_python_is_served_or_harmless(name: str) -> None:
    made = tokenization_auto.tokenizer_class_from_name(f"{name}Tokenizer")
    given = inspect.signature(made.__init__).parameters
    taken = {one for one in given if not one.endswith("_token") and one not in ("self", "args", "kwargs")}
    settings = (CLASSES[name] if name in CLASSES else PIECE_CLASSES[name]).settings
    # Files, a length, and names of languages that only sacremoses looks at.
    other = {"source_spm", "target_spm", "target_vocab_file", "model_max_length", "source_lang", "target_lang"}
    assert taken <= settings | SERVED | HARMLESS | other | {"num_madeup_words"}
    assert settings <= taken


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_lower_case": "yes"}, "do_lower_case must be true or false, found 'yes'"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object, found list"),
        ({"added_tokens_decoder": {"x": {}}}, "'x'. must be an id with an object"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "must be a text, or an object with `content`"),
        ({"extra_special_tokens": 5}, "extra_special_tokens must be a list of tokens, found int"),
        ({"eos_token": 5}, "eos_token must be a text, or an object"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str, root: Path, tmp_path: Path) -> None:
    folder = laid_over(saved(root, "bert"), tmp_path / "model", settings)
    with pytest.raises(ConfigError, match=f"model: tokenizer_config.json: .*{message}"):
        Tokenizer.from_folder(folder)


def _raw(**parts: Any) -> dict[str, Any]:
    raw = RawTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    return json.loads(raw.to_str()) | parts


_STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 1}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"pre_tokenizer": _split("(a+)+$")}, "a" * 5_000 + "b"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "ab"),
        ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}}, "b"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, _STRIP]}}, None),
    ],
)
def test_a_panic_of_the_library_is_an_error_of_its_request(
    parts: dict[str, Any], text: str | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(_raw(**parts)))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    with pytest.raises(TokenizerError, match="the model's tokenizer gave up: "):
        tokenizer.decode([]) if text is None else tokenizer.encode(text)


_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_WORDS = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0, "##a": 1}}


def _around(pieces: list[dict[str, Any]], ids: Sequence[int] = (0,)) -> dict[str, Any]:
    token = {"id": "a", "ids": list(ids), "tokens": ["a"] * len(ids)}
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, *pieces]
    pair = [{"Sequence": {"id": which, "type_id": 0}} for which in "AB"]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"a": token}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 40}}, "more than 1000 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1001}}, "more than 1000 characters before a text"),
        (
            {"post_processor": _around([{"SpecialToken": {"id": "a", "type_id": 0}}] * 1001)},
            "adds more than 1000 tokens",
        ),
        ({"post_processor": _around([], ids=[0] * 1001)}, "adds more than 1000 tokens"),
        ({"post_processor": _around([{"Sequence": {"id": "A", "type_id": 0}}] * 1001)}, "more than 1000 times"),
        ({"model": _WORDS | {"max_input_chars_per_word": 10**18}}, "max_input_chars_per_word is 10000"),
        ({"pre_tokenizer": _split(r"(?<n>\g<n>a)")}, "never ending recursion"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "cannot be read"),
        ({"added_tokens": [{"id": 2**70}]}, "cannot be read"),
    ],
)
def test_a_tokenizer_json_that_would_take_minutes_is_refused(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(_raw(**parts)))
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_texts_in_parts_are_cleaned_as_whole_ones() -> None:
    chance = random.Random(0)
    parts = [" ", " ", "'", ".", " ,", "s", "n't", "ve", "m", "re", "!", "a", "n", "t"]
    for _ in range(2_000):
        text = "".join(chance.choices(parts, k=chance.randrange(30)))
        cleaner, found, at = StreamCleaner(), "", 0
        while at < len(text):
            size = chance.randrange(1, 4)
            found += cleaner.push(text[at : at + size], final=False)
            at += size
        assert found + cleaner.push("", final=True) == clean_up(text), text


@cache
def large(root: Path, cuts: str) -> Path:
    """Return a folder with a vocabulary as large as Mistral's later ones, which is split by `cuts`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"filler{number}" for number in range(100_000))]
    raw = RawTokenizer(models.BPE({name: token for token, name in enumerate(names)}, []))
    old = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kinds = {"two": pre_tokenizers.Sequence([old, byte_level]), "spaces": pre_tokenizers.Metaspace(), "one": byte_level}
    raw.pre_tokenizer = kinds[cuts]
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(root / f"large-{cuts}")
    return root / f"large-{cuts}"


@pytest.mark.parametrize(
    ("cuts", "config", "setting", "mended"),
    [
        ("two", {"model_type": "mistral3", "transformers_version": "4.57.1"}, True, True),
        ("spaces", {"model_type": "mistral"}, True, True),
        ("one", {"model_type": "mistral"}, True, True),
        ("two", {"model_type": "mistral"}, "-", False),
        ("two", {"model_type": "llama", "transformers_version": "4.57.1"}, True, False),
        ("two", {"model_type": "mistral", "transformers_version": "5.0.0"}, True, False),
    ],
)
def test_texts_of_mistral_are_cut_as_the_setting_says(
    cuts: str,
    config: dict[str, Any],
    setting: Any,
    mended: bool,
    root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = laid_over(large(root, cuts), tmp_path / "model", {"fix_mistral_regex": setting}, config=config)
    ours, reference = Tokenizer.from_folder(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    before = RawTokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert ours is not None and before is not None
    found, expected = ours._tokenizer.pre_tokenizer, reference.backend_tokenizer.pre_tokenizer
    for text in _TEXTS:
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
    assert (found.pre_tokenize_str("aB 1234") != before.pre_tokenize_str("aB 1234")) is mended
    told = [record for record in caplog.records if "fix_mistral_regex" in record.getMessage()]
    assert len([one for one in told if one.name.startswith("triptych.model.")]) == (setting == "-" and cuts == "two")


def test_a_tokenizer_json_for_later_versions_is_read(root: Path, tmp_path: Path) -> None:
    names = ["tokenizer.4.0.0.json", "tokenizer.4.9.1.json", "tokenizer.77.0.json", "tokenizer.x.json"]
    folder = laid_over(saved(root, "plain"), tmp_path / "model", {"fast_tokenizer_files": names})
    whole = json.loads((folder / "tokenizer.json").read_text())
    for place, name in enumerate(names):
        more = {"id": 400 + place, **_token(f"<{name}>")}
        (folder / name).write_text(json.dumps({**whole, "added_tokens": [*whole["added_tokens"], more]}))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert ours is not None
    assert [ours.encode(f"<{name}>").ids for name in names] == [
        tuple(reference(f"<{name}>").input_ids) for name in names
    ]
    assert ours.special_token_id("<tokenizer.4.9.1.json>") is not None
    (folder / "tokenizer.json").unlink()
    found = Tokenizer.from_folder(folder)
    assert found is not None and found.vocab_size == ours.vocab_size
