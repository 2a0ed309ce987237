"""The command `quality`, which measures the quality of the embedded models in each number format.

It measures bits per byte of `code` on its held-out sample, exact match of `normalize` on held-out pairs, and the cosine
of `embed`'s vectors with those in float32, all with the serving engine.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.runs import flags
from model.api.engine_config import EngineConfig
from model.llm import LLM
from model.pretrained import embedded_models
from model.pretrained.training import corpus, pairs
from model.pretrained.training.evaluate import bits_per_byte, exact_match, pieces

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-g128": {"dtype": "bfloat16", "quantization": "int8-g128"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4-g32": {"dtype": "bfloat16", "quantization": "int4-g32"},
    "int4-g128": {"dtype": "bfloat16", "quantization": "int4-g128"},
    "int8, int8 KV": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("quality", help="quality of the embedded models in each number format")
    parser.add_argument("--pairs", type=flags.positive, default=1_000, help="held-out pairs for normalize")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure every number format, and print a table and one JSON line."""
    paths = embedded_models()
    sample = pieces(corpus.held_out_sample())
    held_out = pairs.held_out_pairs(arguments.pairs, seed=1)
    exact = None
    rows = []
    for name, settings in FORMATS.items():
        models = {model: LLM(path, EngineConfig(device="cpu", **settings)) for model, path in paths.items()}
        vectors = models["embed"].encode(sample[:64])
        exact = vectors if exact is None else exact
        row = {
            "format": name,
            "bits_per_byte": bits_per_byte(models["code"], sample),
            "exact_match": exact_match(models["normalize"], held_out),
            "least_cosine": float((vectors * exact).sum(axis=1).min()),
        }
        rows.append(row)
    table = Table("format", "code, bits per byte", "normalize, exact match", "embed, least cosine", title="quality")
    for row in rows:
        figures = (f"{row[key]:.5f}" for key in ("bits_per_byte", "exact_match", "least_cosine"))
        table.add_row(str(row["format"]), *figures)
    Console().print(table)
    print(json.dumps({"schema": 1, "rows": rows}))
