"""Tokenizers of GGUF metadata give the ids of the tokenizer files that it was made of, and those of llama.cpp."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.model.gguf_files import write_gguf
from tests.model.tokenizer_folders import strings, write_folder
from triptych.model.errors import ConfigError
from triptych.model.text.gguf_pretokenizers import PRE_TOKENIZERS
from triptych.model.text.gguf_tokenizer import gguf_tokenizer_config
from triptych.model.text.piece_tokenizers import byte_alphabet
from triptych.model.text.sentencepiece_model import read_sentencepiece
from triptych.model.text.tokenizer import Tokenizer
from triptych.model.text.tokenizer_files import SENTENCEPIECE_NAMES
from triptych.service.chat.template_files import TemplateFiles, template_files

_DATA = Path(__file__).parent.parent / "data" / "gguf_pretokenizers.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
Entries = dict[str, tuple[str, Any]]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def write(path: Path, **entries: tuple[str, Any]) -> Path:
    """Write a file with this tokenizer and no tensors."""
    named = {f"tokenizer.{name.replace('__', '.')}": entry for name, entry in entries.items()}
    return write_gguf(path, {"general.architecture": ("STRING", "llama"), **named}, {})


def _ids(**tokens: int) -> Entries:
    return {f"ggml__{name}_token_id": ("UINT32", token) for name, token in tokens.items()}


def _pieces(folder: Path, kind: str) -> Entries:
    model = read_sentencepiece(next(folder / name for name in SENTENCEPIECE_NAMES if (folder / name).is_file()))
    found: Entries = {
        "ggml__model": ("STRING", kind),
        "ggml__tokens": ("ARRAY", [piece.text for piece in model.pieces]),
        "ggml__scores": ("ARRAY", [piece.score for piece in model.pieces]),
        "ggml__token_type": ("ARRAY", [int(piece.kind) for piece in model.pieces]),
    }
    if model.charsmap:
        found["ggml__precompiled_charsmap"] = ("ARRAY", ("UINT8", list(model.charsmap)))
    return found


def _t5(folder: Path) -> Entries:
    """T5's class adds the sentinels, which have no pieces; mT5's file has all tokens."""
    return _pieces(folder, "t5") | _ids(eos=1, unknown=2, padding=0)


def _llama(folder: Path) -> Entries:
    return _pieces(folder, "llama") | _ids(bos=1, eos=2, unknown=0) | {"ggml__add_eos_token": ("BOOL", True)}


def _gemma(folder: Path) -> Entries:
    return _pieces(folder, "llama") | _ids(bos=2, eos=1, unknown=3) | {"ggml__add_space_prefix": ("BOOL", False)}


def _xlm_roberta(folder: Path) -> Entries:
    """Return the pieces in fairseq's order, with the mask after them."""
    found = _pieces(folder, "t5")
    first: Entries = {
        "ggml__tokens": ("ARRAY", ["<s>", "<pad>", "</s>", "<unk>"]),
        "ggml__scores": ("ARRAY", [0.0] * 4),
        "ggml__token_type": ("ARRAY", [_CONTROL, _CONTROL, _CONTROL, _UNKNOWN]),
    }
    for (key, (_, before)), last in zip(first.items(), ("<mask>", 0.0, _CONTROL), strict=True):
        found[key] = ("ARRAY", [*before, *found[key][1][3:], last])
    mask = len(found["ggml__tokens"][1]) - 1
    begins: Entries = {"ggml__add_bos_token": ("BOOL", True)}
    return found | _ids(bos=0, eos=2, unknown=3, padding=1, mask=mask) | begins


def _bert(folder: Path) -> Entries:
    """GGUF marks the beginnings of words, WordPiece marks the continuations."""
    names = (folder / "vocab.txt").read_text().split("\n")[:-1]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    marked = [name if name in special else name[2:] if name.startswith("##") else f"\u2581{name}" for name in names]
    kinds = [_CONTROL if name in special else _NORMAL for name in names]
    ids = {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "seperator": 3, "mask": 4}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    lower = settings["do_lower_case"]
    return _ids(**ids) | {
        "ggml__model": ("STRING", "bert"),
        "ggml__tokens": ("ARRAY", marked),
        "ggml__token_type": ("ARRAY", kinds),
        "ggml__normalizer__lowercase": ("BOOL", lower),
        "ggml__normalizer__strip_accents": ("BOOL", settings.get("strip_accents", lower)),
    }


def _gpt2(folder: Path) -> Entries:
    ids = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().split("\n")
    names = sorted(ids, key=lambda name: ids[name])
    control = ("<|endoftext|>",)
    return _ids(bos=ids["<|endoftext|>"], eos=ids["<|endoftext|>"]) | {
        "ggml__model": ("STRING", "gpt2"),
        "ggml__pre": ("STRING", "gpt-2"),
        "ggml__tokens": ("ARRAY", names),
        "ggml__token_type": ("ARRAY", [_CONTROL if name in control else _NORMAL for name in names]),
        "ggml__merges": ("ARRAY", [line for line in merges if line and not line.startswith("#version")]),
    }


MADE: dict[str, Callable[[Path], Entries]] = {
    "mt5": _t5,
    "llama-legacy": _llama,
    "gemma": _gemma,
    "xlm-roberta": _xlm_roberta,
    "bert": _bert,
    "bert-cased": _bert,
    "gpt2": _gpt2,
}


@pytest.mark.parametrize("name", MADE)
def test_ids_and_texts_are_those_of_the_files(name: str, root: Path) -> None:
    folder = write_folder(name, root / name)
    if name == "gemma":  # our pieces have these names
        settings = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = Tokenizer.from_folder(folder)
    found = Tokenizer.from_folder(write(root / f"{name}.gguf", **MADE[name](folder)))
    assert expected is not None and found is not None
    for text in (*strings(400), "", " ", "\n"):
        if name == "gemma" and "<mask>" in text:  # our pieces lack it
            continue
        for added in (False, True):
            ids = expected.encode(text, add_special_tokens=added)
            assert found.encode(text, add_special_tokens=added).ids == ids.ids, text
        assert found.decode(ids.ids) == expected.decode(ids.ids)
    if name.startswith("bert"):
        assert found.encode("one text", "another") == expected.encode("one text", "another")
    assert (found.mask_id, found.unknown_id) == (expected.mask_id, expected.unknown_id) or name in ("gpt2", "gemma")


@cache
def pretokenizers() -> dict[str, Any]:
    """Return merges, pieces of texts, and digests of their ids by llama.cpp (of llama-cpp-python 0.3.36).

    Texts for Qwen's rules have no decomposed characters, because llama.cpp does not compose them. Texts for `gpt-4o`
    have no English short form after a mark, because llama.cpp's pattern differs there from the published one.
    """
    found: dict[str, Any] = json.loads(_DATA.read_text())
    return found


def random_texts() -> list[str]:
    chance, pieces = random.Random(0), pretokenizers()["pieces"]
    return ["".join(chance.choice(pieces) for _ in range(chance.randint(1, 14))) for _ in range(150)]


def byte_level(path: Path, pre: str) -> Path:
    merges = pretokenizers()["merges"]
    names = ["<|begin|>", *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    return write(
        path,
        **_ids(bos=0, eos=0),
        ggml__model=("STRING", "gpt2"),
        ggml__pre=("STRING", pre),
        ggml__tokens=("ARRAY", names),
        ggml__token_type=("ARRAY", [_CONTROL] + [_NORMAL] * (len(names) - 1)),
        ggml__merges=("ARRAY", merges),
    )


# Texts that llama.cpp cuts differently than the models' tokenizer.json, as its patterns know no letter case.
_PUBLISHED = {"kimi-k2", "youtu", "tiny_aya", "cohere2moe", "afmoe"}


@pytest.mark.parametrize("pre", [name for name in PRE_TOKENIZERS if name not in {*_PUBLISHED, "superbpe"}])
def test_texts_are_cut_as_llama_cpp_cuts_them(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", pre))
    assert tokenizer is not None
    ids = [list(found.ids) for found in tokenizer.encode_batch(random_texts())]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == pretokenizers()["digests"][pre]


@pytest.mark.parametrize("pre", sorted(_PUBLISHED))
def test_texts_are_cut_as_published(pre: str) -> None:
    text = "HelloWorld it's \u6f22\u5b57\u304b\u306a 12345\n"
    found = [piece for piece, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]
    assert ("HelloWorld" in found) == (pre == "afmoe") and "\u010a" in found
    digits = {"kimi-k2": ["123", "45"], "youtu": ["1", "2", "3", "4", "5"]}.get(pre, ["12", "345"])
    assert [piece for piece in found if piece.isdecimal()] == digits


def test_superbpe_cuts_digits_by_threes_from_the_right_and_words_not_at_all() -> None:
    found = PRE_TOKENIZERS["superbpe"].build().pre_tokenize_str("of the 1234567 \u0663\u0664\u0665\u0666")
    assert [piece for piece, _ in found][:4] == ["of\u0120the\u0120", "1", "234", "567"] and len(found) == 7


def test_a_file_without_the_name_of_a_rule_has_the_default(tmp_path: Path) -> None:
    plain, named = (Tokenizer.from_folder(byte_level(tmp_path / f"x{pre}.gguf", pre)) for pre in ("", "default"))
    assert plain is not None and named is not None
    texts = random_texts()
    assert plain.encode_batch(texts) == named.encode_batch(texts)


def test_gemma_4s_lines_are_merged_whole(tmp_path: Path) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = ["\u2581 a", "a b", "\u2581a b", "\n \n"]
    names = ["<pad>", "<bos>", *bytes_, "\u2581", "a", "b", "\n", *(merge.replace(" ", "") for merge in merges)]
    file = write(
        tmp_path / "x.gguf",
        **_ids(bos=1, eos=0),
        ggml__model=("STRING", "gemma4"),
        ggml__tokens=("ARRAY", names),
        ggml__token_type=("ARRAY", [_CONTROL] * 2 + [_BYTE] * 256 + [_NORMAL] * (len(names) - 258)),
        ggml__merges=("ARRAY", merges),
    )
    tokenizer = Tokenizer.from_folder(file)
    assert tokenizer is not None
    text = " ab  a\n\nab\u00e9"
    ids = tokenizer.encode(text).ids
    assert [names[token] for token in ids] == [
        *("<bos>", "\u2581ab", "\u2581", "\u2581a", "\n\n", "ab", "<0xC3>", "<0xA9>"),
    ]
    assert tokenizer.decode(ids) == text


def test_tokens_without_a_text_have_the_names_that_llama_cpp_gives_them(tmp_path: Path) -> None:
    """Some vocabularies have several such tokens."""
    names = ("ARRAY", ["a", "", "b", ""])
    kind = {"ggml__model": ("STRING", "gpt2"), "ggml__pre": ("STRING", "gpt-2"), "ggml__tokens": names}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "x.gguf", **kind, ggml__merges=("ARRAY", ("STRING", []))))
    assert tokenizer is not None and tokenizer.encode("ab").ids == (0, 2)


def _with_marks(path: Path, folder: Path, architecture: str, name: str) -> Tokenizer:
    entries = _llama(folder) | {"ggml__add_bos_token": ("BOOL", False), "ggml__add_eos_token": ("BOOL", False)}
    for key, more in (("tokens", ["<|user|>", "<|end|>"]), ("scores", [0.0] * 2), ("token_type", [_USER, _CONTROL])):
        entries[f"ggml__{key}"] = ("ARRAY", [*entries[f"ggml__{key}"][1], *more])
    named = {f"tokenizer.{key.replace('__', '.')}": entry for key, entry in entries.items()}
    said = {"general.architecture": ("STRING", architecture), "general.name": ("STRING", name)}
    found = Tokenizer.from_folder(write_gguf(path, {**said, **named}, {}))
    assert found is not None
    return found


@pytest.mark.parametrize(("architecture", "name"), [("phi3", "My tune"), ("llama", "Phi-3 mini as a Llama")])
def test_tokens_of_phi_3_take_the_spaces_after_them(architecture: str, name: str, root: Path, tmp_path: Path) -> None:
    """As in its tokenizer.json, and in llama.cpp by the name: its template has a line break after every mark."""
    folder = write_folder("llama-legacy", root / f"marks-{architecture}")
    found = _with_marks(tmp_path / "x.gguf", folder, architecture, name)
    user, end, close = (found.token_id(text) for text in ("<|user|>", "<|end|>", "</s>"))
    word, begin = found.encode("Hello").ids, found.token_id("<s>")
    assert found.encode("<|user|>\nHello<|end|> \n<|user|>").ids == (user, *word, end, user)
    assert found.encode("</s>\nHello").ids == (close, *word)
    assert found.encode("<s>\nHello").ids[1:] == found.encode("\nHello").ids and found.encode("<s>").ids == (begin,)
    plain = _with_marks(tmp_path / "y.gguf", folder, "llama", "Some Llama")
    assert plain.encode("<|user|>\nHello").ids == (user, *plain.encode("\nHello").ids) != (user, *word)


def test_a_mask_takes_the_space_before_it_where_published_ones_do(tmp_path: Path) -> None:
    for pre, text, takes in (
        ("jina-v2-de", "<mask>", True),
        ("modern-bert", "[MASK]", True),
        ("gpt-2", "<mask>", False),
    ):
        merges = pretokenizers()["merges"]
        names = [text, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
        file = write(
            tmp_path / f"{pre}.gguf",
            **_ids(mask=0),
            ggml__model=("STRING", "gpt2"),
            ggml__pre=("STRING", pre),
            ggml__tokens=("ARRAY", names),
            ggml__token_type=("ARRAY", [_CONTROL] + [_NORMAL] * (len(names) - 1)),
            ggml__merges=("ARRAY", merges),
        )
        tokenizer = Tokenizer.from_folder(file)
        assert tokenizer is not None
        assert (tokenizer.encode(f"a {text}").ids == tokenizer.encode(f"a{text}").ids) == takes


def test_a_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    """Its texts would be single bytes."""
    names = ("ARRAY", ["a", "b", "ab"])
    file = write(tmp_path / "x.gguf", ggml__model=("STRING", "gpt2"), ggml__pre=("STRING", "gpt-2"), ggml__tokens=names)
    with pytest.raises(ConfigError, match=r"x\.gguf: tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_folder(file)


def test_templates_are_found_by_their_names_alone(tmp_path: Path) -> None:
    plain: Entries = {"ggml__model": ("STRING", "gpt2"), "ggml__tokens": ("ARRAY", ["a", "b"])}
    named: Entries = {**plain, "chat_template.tool_use": ("STRING", "{{ tools }}")}
    found = gguf_tokenizer_config(write(tmp_path / "x.gguf", **named))["chat_template"]
    assert found == {"tool_use": "{{ tools }}"}
    both: Entries = {**named, "chat_template": ("STRING", "{{ messages }}")}
    found = gguf_tokenizer_config(write(tmp_path / "y.gguf", **both))["chat_template"]
    assert found == {"tool_use": "{{ tools }}", "default": "{{ messages }}"}


def test_qwens_texts_are_composed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", "qwen2"))
    assert tokenizer is not None and tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__pre": ("STRING", "marvellous")}, r"tokenizer\.ggml\.pre 'marvellous' is not served; put the model's"),
        ({"ggml__model": ("STRING", "rwkv")}, r"tokenizer\.ggml\.model 'rwkv' is not served; served are gpt2, gemma4"),
        ({"ggml__model": ("STRING", "llama")}, r"tokenizer\.ggml\.eos_token_id is missing"),
        ({"ggml__model": ("STRING", "bert")}, r"tokenizer\.ggml\.(unknown|seperator)_token_id is missing"),
        ({"ggml__model": ("STRING", "t5")}, r"tokenizer\.ggml\.scores has 0 of 2 entries"),
        ({"ggml__merges": ("ARRAY", ["ab"])}, r"tokenizer\.ggml\.merges must join two tokens to another, found 'ab'"),
        ({"ggml__merges": ("ARRAY", ["a b"])}, r"tokenizer\.ggml\.merges must join two tokens to another, found 'a b'"),
        ({"huggingface__json": ("STRING", "{")}, "its tokenizer cannot be built"),
        ({"ggml__tokens": ("ARRAY", ["a", "a"])}, r"tokenizer\.ggml\.tokens has the same text twice"),
        ({"ggml__token_type": ("ARRAY", [1])}, r"tokenizer\.ggml\.token_type has 1 of 2 entries"),
        ({"ggml__tokens": ("ARRAY", [1, 2])}, r"tokenizer\.ggml\.tokens must be a list of texts"),
        (
            {"chat_template": ("UINT32", 1), "ggml__add_bos_token": ("BOOL", True)},
            r"tokenizer\.chat_template must be a string, found 1",
        ),
        ({"ggml__add_bos_token": ("UINT32", 1)}, r"tokenizer\.ggml\.add_bos_token must be true or false, found 1"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_its_key(changes: Entries, message: str, tmp_path: Path) -> None:
    plain: Entries = {
        "ggml__model": ("STRING", "gpt2"),
        "ggml__pre": ("STRING", "gpt-2"),
        "ggml__tokens": ("ARRAY", ["a", "b"]),
        "ggml__merges": ("ARRAY", ("STRING", [])),
    }
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(write(tmp_path / "x.gguf", **(plain | changes)))


def test_a_file_without_a_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write(tmp_path / "x.gguf", ggml__model=("STRING", "none"))) is None


def test_files_beside_win_in_a_folder(root: Path, tmp_path: Path) -> None:
    """A file named alone uses its own; in a folder tokenizer.json and the template next to the file take precedence."""
    entries = {"chat_template": ("STRING", "{{ bos_token }}{{ messages[0].content }}")}
    file = byte_level(tmp_path / "x.gguf", "gpt-2")
    named = write(
        tmp_path / "y.gguf",
        **entries,
        **_ids(bos=1),
        ggml__model=("STRING", "gpt2"),
        ggml__tokens=("ARRAY", ["a", "<s>"]),
    )
    assert template_files(named) == TemplateFiles(
        {"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"}
    )
    named.unlink()
    vocabulary = {"ggml__model": ("STRING", "gpt2"), "ggml__tokens": ("ARRAY", ["a", "<s>"])}
    more = {"chat_templates": ("ARRAY", ["tool_use"]), "chat_template.tool_use": ("STRING", "{{ tools }}")}
    file_of_both = write(tmp_path / "z.gguf", **entries, **more, **vocabulary)
    both = template_files(file_of_both)
    assert both is not None and both.templates["tool_use"] == "{{ tools }}" and "messages" in both.templates["default"]
    file_of_both.unlink()
    assert template_files(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "folder"}))
    assert template_files(tmp_path) == TemplateFiles(
        {"default": "folder"}, {"bos_token": "<|begin|>", "eos_token": "<|begin|>"}
    )
    assert template_files(file) is None
    other = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    folders, own = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(file)
    assert folders is not None and own is not None
    assert folders.vocab_size == 2 < own.vocab_size
