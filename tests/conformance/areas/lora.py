"""LoRA adapters that PEFT itself makes, saves and computes, for tiny models of many families."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.checkpoints import CPU, KINDS, loaded, native_backends, prompt, saved
from tests.model.lora import modules_of
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.errors import ConfigError
from triptych.model.network.inputs import packed_input
from triptych.model.network.lora import AdapterRuns
from triptych.model.network.lora_weights import load_adapter
from triptych.model.network.transformer import Transformer

_CLOSE = 1e-4  # of the largest logit
_LLAMA: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "v_proj"]},
    "ends of names": {"target_modules": ["self_attn.q_proj", "0.mlp.up_proj"]},
    "pattern": {"target_modules": r".*layers\.1\..*(q_proj|down_proj)"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["k_proj", "layers.0.mlp.up_proj"]},
    "excluded by pattern": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*layers\.0.*"},
    "some layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "layers by name": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "ranks": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 7, "up_proj": 3}},
    "alphas": {
        "target_modules": ["q_proj", "up_proj"],
        "alpha_pattern": {"up_proj": 32, r"layers\.[01].self_attn.q_proj": 2},
    },
    "from the beginning": {"target_modules": ["q_proj"], "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 64}},
    "rslora and patterns": {"target_modules": ["q_proj", "k_proj"], "use_rslora": True, "rank_pattern": {"k_proj": 9}},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal", "r": 8},
    "large rank": {"target_modules": ["q_proj", "v_proj"], "r": 64},
    "rank 1": {"target_modules": ["q_proj", "gate_proj"], "r": 1},
}
_REFUSED: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "lora_bias": {"target_modules": ["up_proj"], "lora_bias": True, "init_lora_weights": True},
    "pissa": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
    "olora": {"target_modules": ["q_proj"], "init_lora_weights": "olora"},
    "saved table": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved output": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "adapted output": {"target_modules": ["q_proj", "lm_head"]},
    "adapted table": {"target_modules": ["q_proj", "embed_tokens"]},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "replicated layers": {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]},
    "alora": {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]},
}


def run(report: Report, packages: Packages) -> None:
    sys.path.insert(0, str(packages.importable("peft", "accelerate")))
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as made:
        for case, settings in _LLAMA.items():
            _check(report, f"llama {case}", "llama", settings, Path(made) / "llama" / case)
        _check(report, "llama pickled", "llama", {"target_modules": ["q_proj"]}, Path(made) / "bin", safe=False)
        for case, settings in _REFUSED.items():
            _check(report, f"llama {case}", "llama", settings, Path(made) / "refused" / case, refused=True)
        for kind in _decoders():
            conv = "gpt2" in kind
            settings = {"target_modules": "all-linear", "fan_in_fan_out": conv}
            _check(report, f"{kind} all-linear", kind, settings, Path(made) / kind)
        for kind in _classifiers():
            task = "TOKEN_CLS" if loaded_config(kind).classifies_tokens else "SEQ_CLS"
            settings = {"target_modules": _of_layers(kind), "fan_in_fan_out": "gpt2" in kind, "task_type": task}
            _check(report, f"{kind} with its classifier", kind, settings, Path(made) / kind)


def _decoders() -> Iterator[str]:
    """Yield the kinds of decoders that read texts alone."""
    for kind in KINDS:
        config = loaded_config(kind)
        if (
            config is not None
            and config.form == "decoder-only"
            and config.text_type is None
            and config.classifier is None
        ):
            yield kind


def _classifiers() -> Iterator[str]:
    """Yield the kinds of encoders and decoders that classify texts or their tokens."""
    for kind in KINDS:
        config = loaded_config(kind)
        if (
            config is not None
            and config.classifier is not None
            and not config.classifier.spans
            and config.image is None
            and config.form != "encoder-decoder"
        ):
            yield kind


def _of_layers(kind: str) -> list[str]:
    """Return the names of the projections of a model's layers, and of BERT's pooler."""
    modules = modules_of(saved(kind).reference, r"\.\d+\.|\.pooler\.dense")
    return [name for name in modules if not name.startswith("classifier")]


def loaded_config(kind: str) -> Any:
    from triptych.model.checkpoint.folder import read_checkpoint

    try:
        return read_checkpoint(saved(kind).path).config
    except ConfigError:
        return None


def _check(
    report: Report,
    case: str,
    kind: str,
    settings: dict[str, Any],
    folder: Path,
    *,
    refused: bool = False,
    safe: bool = True,
) -> None:
    import peft

    known = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    base = copy.deepcopy(saved(kind).reference)
    torch.manual_seed(len(case))
    try:
        adapted = peft.get_peft_model(base, peft.LoraConfig(**known | settings)).eval()
        _draw(adapted)
        adapted.save_pretrained(folder, safe_serialization=safe)
    except Exception as error:
        report.refuses(case, f"PEFT itself does not make it: {str(error)[:200]}")
        return
    model = loaded(kind, native_backends()[0])
    try:
        adapter = load_adapter("a", read_adapter(folder), model)
    except ConfigError as error:
        if refused or "not served" in str(error):
            report.refuses(case, str(error))
        else:
            report.fails(case, str(error))
        return
    if refused:
        report.fails(case, "it is served, and was expected to be refused")
        return
    ids = prompt(9)
    with torch.inference_mode():
        theirs = adapted(torch.tensor([ids])).logits[0]
        plain = saved(kind).reference(torch.tensor([ids])).logits[0]
        classifies = model.config.classifier is not None
        ours = _labels(model, ids, adapter) if classifies else _logits(model, ids, adapter)
        ours = ours.reshape(theirs.shape)
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    changes = float((plain - theirs).abs().max() / theirs.abs().max())
    report.check(case, apart < _CLOSE < changes, f"{apart:.1e} apart, and the adapter changes {changes:.1e}")


@torch.no_grad()
def _draw(model: Any) -> None:
    """Draw the matrices large enough to be seen."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name or "modules_to_save" in name:
            parameter.normal_(std=0.2)


def _logits(model: Transformer, ids: tuple[int, ...], adapter: Any) -> torch.Tensor:
    inputs = replace(packed_input([ids], CPU, causal=True), adapters=AdapterRuns.of_segments([adapter], [len(ids)]))
    return model.logits(model.decode(inputs))


def _labels(model: Transformer, ids: tuple[int, ...], adapter: Any) -> torch.Tensor:
    """Return the logits of a classifier, of the text or of each token."""
    causal = model.encoder is None
    runs = AdapterRuns.of_segments([adapter], [len(ids)])
    inputs = replace(packed_input([ids], CPU, causal=causal), adapters=runs)
    return model.classify(model.decode(inputs) if causal else model.encode(inputs), adapter)
