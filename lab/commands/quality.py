"""The command `quality`, which measures the quality of the embedded models in each number format.

It measures bits per byte of `code` on its held-out sample, exact match of `normalize` on held-out pairs, and the cosine
of `embed`'s vectors with those in float32, all with the serving engine; with outlier channels planted into the models
if requested. llama.cpp's formats of `code` are measured too, if `llama-cpp-python` and `gguf` are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench.outliers import plant
from lab.bench.peers import llama_cpp_formats
from lab.training import corpus, pairs
from lab.training.evaluate import WRITTEN, bits_per_byte, exact_match, pieces
from triptych.loadtest.runs import flags
from triptych.model.api.engine_config import INTEGERS, EngineConfig
from triptych.model.llm import LLM
from triptych.model.pretrained import SMALL, embedded_models
from triptych.model.quantization.folder import quantize

_TEXTS = 100  # that search scales
_START = 0  # of `code`'s texts
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    **{name: {"dtype": "bfloat16", "quantization": name} for name in INTEGERS},
    "int8, int8 KV": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("quality", help="quality of the embedded models in each number format")
    parser.add_argument("--pairs", type=flags.positive, default=1_000, help="held-out pairs for normalize")
    parser.add_argument(
        "--outliers",
        type=_power_of_two,
        metavar="TIMES",
        help="plant outlier channels larger than the others by this factor, a power of two (default: none)",
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="those of ours (all)")
    parser.add_argument(
        "--texts", action="store_true", help="measure code in 4 bits also with scales that texts of its training search"
    )
    parser.set_defaults(command=run)


def _power_of_two(text: str) -> int:
    value = flags.positive(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a power of two")
    return value


def run(arguments: argparse.Namespace) -> None:
    """Measure every number format, and print a table and one JSON line."""
    with TemporaryDirectory() as folder:
        paths = {model: embedded_models()[model] for model in SMALL}
        if arguments.outliers is not None:
            paths = {model: plant(path, Path(folder, model), arguments.outliers) for model, path in paths.items()}
        rows = _ours(paths, arguments)
        if arguments.texts:
            rows += _searched(paths["code"], Path(folder), arguments.formats)
        rows += _peers(paths["code"], Path(folder))
    table = Table("format", "code, bits per byte", "normalize, exact match", "embed, least cosine", title="quality")
    for row in rows:
        measured = (row.get(key) for key in ("bits_per_byte", "exact_match", "least_cosine"))
        table.add_row(str(row["format"]), *("" if value is None else f"{value:.5f}" for value in measured))
    Console().print(table)
    print(json.dumps({"schema": 1, "outliers": arguments.outliers, "rows": rows}))


def _ours(paths: Mapping[str, Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    sample = pieces(corpus.held_out_sample())
    held_out = pairs.held_out_pairs(arguments.pairs, seed=1)
    exact = LLM(paths["embed"], EngineConfig(device="cpu", dtype="float32")).encode(sample[:64])
    rows = []
    for name in arguments.formats:
        models = {model: LLM(path, EngineConfig(device="cpu", **FORMATS[name])) for model, path in paths.items()}
        vectors = models["embed"].encode(sample[:64])
        row = {
            "format": name,
            "bits_per_byte": bits_per_byte(models["code"], sample),
            "exact_match": exact_match(models["normalize"], held_out, WRITTEN),
            "least_cosine": float((vectors * exact).sum(axis=1).min()),
        }
        rows.append(row)
    return rows


def _searched(code: Path, folder: Path, formats: Sequence[str]) -> list[dict[str, Any]]:
    """`code` as `triptych quantize --texts` writes it, with texts that it was trained on."""
    documents = corpus.documents(held_out=False)
    texts = [piece for document in documents[:: len(documents) // _TEXTS] for piece in pieces(document.text)[:1]]
    file, rows = folder / "texts", []
    file.write_text("\n\n".join(re.sub(r"\n\s*\n", "\n", text) for text in texts), encoding="utf-8")
    for name in formats:
        if name.startswith("int4"):
            quantize(code, folder / name, name, texts=file)
            llm = LLM(folder / name, EngineConfig(device="cpu", **FORMATS[name]))
            rows.append(
                {"format": f"{name}, texts", "bits_per_byte": bits_per_byte(llm, pieces(corpus.held_out_sample()))}
            )
    return rows


def _peers(code: Path, folder: Path) -> list[dict[str, Any]]:
    """llama.cpp's formats on `code`, with the same tokens; none where it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")):
        return []
    tokenizer = LLM(code, EngineConfig(device="cpu")).tokenizer
    assert tokenizer is not None
    texts = [(text, _without_start(tokenizer.encode(text).ids)) for text in pieces(corpus.held_out_sample())]
    file, rows = folder / "code.gguf", []
    llama_cpp_formats.write_gguf(code, file)
    for name in llama_cpp_formats.FORMATS:
        quantised = llama_cpp_formats.quantised(file, folder / f"{name}.gguf", name)
        figure = llama_cpp_formats.bits_per_byte(quantised, _START, texts)
        rows.append({"format": f"llama.cpp {name}", "bits_per_byte": figure})
    return rows


def _without_start(ids: Sequence[int]) -> Sequence[int]:
    return ids[1:] if ids[0] == _START else ids
