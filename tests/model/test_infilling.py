"""Prompts that ask a model for the middle of a text: the marks of each family, users' texts, what is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from tests.model.gguf_files import write_gguf
from triptych.model.text.fill_marks import OtherFile
from triptych.model.text.infilling import Infilling
from triptych.model.text.tokenizer import Tokenizer

FULLWIDTH = "<\uff5cfim▁{}\uff5c>"
FAMILIES = {  # marks in the vocabulary; the prompt of the prefix "a" and the suffix "b"
    "qwen": ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "<|fim_prefix|> a <|fim_suffix|> b <|fim_middle|>"),
    "starcoder": ("<fim_prefix> <fim_middle> <fim_suffix>", "<fim_prefix> a <fim_suffix> b <fim_middle>"),
    "deepseek": (
        " ".join(FULLWIDTH.format(part) for part in ("hole", "begin", "end")),
        " ".join((FULLWIDTH.format("begin"), "a", FULLWIDTH.format("hole"), "b", FULLWIDTH.format("end"))),
    ),
    "code llama": ("▁<PRE> ▁<MID> ▁<SUF>", "▁<PRE> a ▁<SUF> b ▁<MID>"),
    "glm": ("<|code_prefix|> <|code_middle|> <|code_suffix|>", "<|code_prefix|> a <|code_suffix|> b <|code_middle|>"),
    "codestral": ("[SUFFIX] [PREFIX] [MIDDLE]", "[SUFFIX] b [PREFIX] a"),
    "seed": (
        "<[fim-prefix]> <[fim-suffix]> <[fim-middle]>",
        "<[fim-suffix]> b <[fim-prefix]> a <[fim-middle]>",
    ),
}


def byte_level(*marks: str, special: bool = True, begin: str = "") -> Tokenizer:
    """Return a tokenizer of bytes with these added tokens; `begin` is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_tokens(
        [AddedToken(mark, special=special, normalized=False) for mark in (*marks, *([begin] if begin else []))]
    )
    if begin:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, raw.token_to_id(begin))]
        )
    return Tokenizer(raw)


def infilling(tokenizer: Tokenizer, *, sentinels: bool = False) -> Infilling:
    found = tokenizer.infilling(sentinels=sentinels)
    assert found is not None
    return found


def names(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return " ".join(map(tokenizer.token_name, ids))


@pytest.mark.parametrize(("marks", "prompt"), FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("special", [True, False])
def test_families(marks: str, prompt: str, special: bool) -> None:
    tokenizer = byte_level(*marks.split(), special=special, begin="<s>")
    found = infilling(tokenizer).prompt("a", "b")
    assert names(tokenizer, found.ids) == f"<s> {prompt}"
    assert names(tokenizer, found.ids[found.begin : found.end]) == "a"
    assert set(names(tokenizer, infilling(tokenizer).marks.ends).split()) == set(marks.split())


def test_no_marks() -> None:
    assert byte_level("<|fim_prefix|>", "<|fim_suffix|>").infilling(sentinels=False) is None
    assert byte_level("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>").infilling(sentinels=True) is None


@pytest.mark.parametrize("special", [True, False])
def test_marks_in_a_users_text_stay_text(special: bool) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|file_sep|>")
    tokenizer = byte_level(*marks, special=special)
    text = "".join(marks)
    found = infilling(tokenizer).prompt(text, text, [OtherFile(text, text)])
    expected = byte_level().encode(text).ids
    assert found.ids[found.begin : found.end] == expected
    assert sum(token >= 256 for token in found.ids) == 3 + 2  # the marks, one for each file
    assert tokenizer.decode(found.ids, skip_special_tokens=False).count("<|fim_middle|>") == 5


def test_other_files() -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    files = [OtherFile("a.py", "x"), OtherFile("b.py", "y")]
    with_marks, without = byte_level(*marks, "<repo_name>", "<file_sep>", begin="<s>"), byte_level(*marks)
    asked = "<fim_prefix>a<fim_suffix>b<fim_middle>"
    text = f"<repo_name>myproject\n<file_sep>a.py\nx<file_sep>b.py\ny<file_sep>filename\n{asked}"
    found = infilling(with_marks).prompt("a", "b", files)
    assert with_marks.decode(found.ids, skip_special_tokens=False) == f"<s>{text}"
    snippet = "\n\n--- snippet ---\n\n"
    found = infilling(without).prompt("a", "b", files)
    assert without.decode(found.ids, skip_special_tokens=False) == (f"{snippet}x{snippet}y{asked}")


@pytest.mark.parametrize(
    ("prefix", "suffix", "most", "text"),
    [
        ("abc", "xyz", 10, "<s><1>abc<2>xyz<3>"),
        ("abc", "xyz", 12, "<s>yy<1>abc<2>xyz<3>"),
        ("a" * 40, "xyz", 20, "<s><1>" + "a" * 13 + "<2>xyz<3>"),
        ("b" + "a" * 40, "x" + "y" * 40, 20, "<s><1>" + "a" * 12 + "<2>x" + "y" * 3 + "<3>"),
        ("ba", "x" + "y" * 40, 20, "<s><1>ba<2>x" + "y" * 13 + "<3>"),
        ("abc", "xyz", 2, "<s><1><2><3>"),
    ],
)
def test_what_is_cut(prefix: str, suffix: str, most: int, text: str) -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    tokenizer = byte_level(*marks, begin="<s>")
    found = infilling(tokenizer).prompt(prefix, suffix, [OtherFile("", "x" * 40 + "yy")], most=most)
    shown = tokenizer.decode(found.ids, skip_special_tokens=False)
    for at, mark in enumerate(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 1):
        shown = shown.replace(mark, f"<{at}>")
    assert (shown, found.is_cut) == (text, True)
    assert len(found.ids) <= max(most, 4)


def sentencepiece_like() -> Tokenizer:
    """Return a tokenizer that puts a space in front of every text, as Llama's do."""
    texts = [
        "▁",
        "a",
        "b",
        "<",
        ">",
        "P",
        "R",
        "E",
        "▁<PRE>",
        "▁<SUF>",
        "▁<MID>",
        "▁<EOT>",
        *(f"<0x{n:02X}>" for n in range(256)),
    ]
    raw = RawTokenizer(models.BPE({text: at for at, text in enumerate(texts)}, [], byte_fallback=True, unk_token="a"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(raw)


def test_a_suffix_gets_no_space() -> None:
    tokenizer = sentencepiece_like()
    found = infilling(tokenizer).prompt("ab", "ba b")
    assert names(tokenizer, found.ids) == "▁<PRE> ▁ a b ▁<SUF> b a ▁ b ▁<MID>"


def test_sentinels() -> None:
    texts = [("▁", -2.0), ("▁a", -1.0), ("a", -3.0), ("b", -3.0), ("</s>", 0.0), ("<unk>", 0.0)]
    raw = RawTokenizer(models.Unigram(texts, unk_id=5))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s"), "removed"), pre_tokenizers.Metaspace()]
    )
    raw.add_special_tokens(["<extra_id_1>", "<extra_id_0>"])
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 4)])
    tokenizer = Tokenizer(raw)
    found = infilling(tokenizer, sentinels=True)
    assert names(tokenizer, found.prompt("a b", "a").ids) == "▁a ▁ b <extra_id_0> ▁a </s>"
    assert names(tokenizer, found.marks.started) == "<extra_id_0>"
    assert names(tokenizer, found.marks.ends) == "<extra_id_0> <extra_id_1>"


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_marks_that_gguf_metadata_name(tmp_path: Path, keys: tuple[str, str, str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "one", "two", "three", "<fim_prefix>"]
    control = {f"tokenizer.ggml.{key}_token_id": ("UINT32", 256 + at) for at, key in enumerate(keys)}
    metadata = {
        "general.architecture": ("STRING", "llama"),
        "tokenizer.ggml.model": ("STRING", "gpt2"),
        "tokenizer.ggml.pre": ("STRING", "gpt-2"),
        "tokenizer.ggml.tokens": ("ARRAY", tokens),
        "tokenizer.ggml.merges": ("ARRAY", ("STRING", [])),
        **control,
    }
    tokenizer = Tokenizer.from_folder(write_gguf(tmp_path / "model.gguf", metadata, {}))
    assert tokenizer is not None
    assert names(tokenizer, infilling(tokenizer).prompt("a", "b").ids) == "one a two b three"
