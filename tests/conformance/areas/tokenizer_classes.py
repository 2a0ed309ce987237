"""Tokenizers of every class in both layouts, with each setting and overlay of files, against `transformers`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from tokenizers import Tokenizer as RawTokenizer

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.test_tokenizer_files import texts_for
from tests.model.test_tokenizer_overlays import laid_over, overlays
from tests.model.tokenizer_folders import FOLDERS, write_folder
from triptych.model.text.tokenizer import Tokenizer
from triptych.model.text.tokenizer_builder import CLASSES

_FLAGS = (True, False)
_VALUES: dict[str, tuple[Any, ...]] = {
    "strip_accents": (True, False, None),
    "extra_ids": (0, 10),
    "offset": (103,),
    "src_lang": (),
    "language": ("de", None),
    "task": ("translate", None),
}
_GENERAL = ("split_special_tokens", "clean_up_tokenization_spaces")
_WRITTEN_IN_PYTHON = {"byt5", "marian", "m2m-100", "esm", "siglip"}


def run(report: Report, packages: Packages) -> None:
    logging.getLogger("triptych.model").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    for name in (name for name in FOLDERS if name not in _WRITTEN_IN_PYTHON):
        with TemporaryDirectory() as folder:
            _class(report, name, Path(folder))


def _class(report: Report, name: str, root: Path) -> None:
    files, whole = write_folder(name, root / "files"), root / "json"
    transformers.AutoTokenizer.from_pretrained(files).save_pretrained(whole)
    (whole / "config.json").write_bytes((files / "config.json").read_bytes())
    size = RawTokenizer.from_file(str(whole / "tokenizer.json")).get_vocab_size()
    named = type(transformers.AutoTokenizer.from_pretrained(files)).__name__.removesuffix("Tokenizer")
    settings = sorted(CLASSES[named].settings if named in CLASSES else ())
    for layout, source in (("files", files), ("json", whole)):
        cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("as it is", {}, {})]
        for setting in (*settings, *_GENERAL):
            cases += [(f"{setting} {value}", {setting: value}, {}) for value in _VALUES.get(setting, _FLAGS)]
        if layout == "json":
            cases += [(overlay, *said) for overlay, said in overlays(size).items()]
        for place, (case, given, others) in enumerate(cases):
            _compare(
                report, f"{name}: {layout}: {case}", name, laid_over(source, root / f"{layout}{place}", given, **others)
            )


def _compare(report: Report, case: str, name: str, folder: Path) -> None:
    try:
        reference = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        report.refuses(case, f"transformers refuses it: {error!r:.80}")
        return
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    for text in (*texts_for(name, 80), "<|im_start|>user <new>x<|im_end|>"):
        expected = reference(text).input_ids
        found = list(tokenizer.encode(text).ids)
        shown, ours = reference.decode(expected, skip_special_tokens=True), tokenizer.decode(expected)
        if found != expected or shown != ours:
            report.fails(case, json.dumps([text, shown, ours], ensure_ascii=False))
            return
    report.passes(case)
