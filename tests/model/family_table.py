"""Writes docs/families.md: `python -m tests.model.family_table`.

Its tables show what the families derive from settings: those of each class's defaults, and those of published models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model.test_published import PUBLISHED
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    NormConfig,
    NormKind,
    RotaryConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.layer import ExpertsConfig, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionKind, StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES, WHOLES, config_from_raw

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "families.md"
_FORMS = ("decoder-only", "encoder-decoder", "encoder-only")
_HEAD = """# Families

Every `model_type` that is served, and what its layers are made of.
`python -m tests.model.family_table` writes this page from the families' own tables.
[adding-a-family.md](adding-a-family.md) tells how to add one, [checkpoints.md](checkpoints.md) what a folder may hold.
NLLB is `m2m_100`, Pythia is `gpt_neox`, Command R is `cohere`.

"""
_TABLE = """
## What their layers are

| `model_type` | for example | form | positions | norms | feed-forward | further |
|---|---|---|---|---|---|---|
"""
_SUMMARY = "| form | `model_type` |\n|---|---|\n"
_WHOLES = "a model that reads images or sounds too ([more](decoders.md#models-of-text-and-images))"
# Arguments of torch.nn.Transformer, which has neither a configuration class nor a published model.
_TORCH = {"model_type": "transformer", "vocab_size": 100, "d_model": 32, "nhead": 4, "num_encoder_layers": 2}
_TORCH |= {"num_decoder_layers": 2, "dim_feedforward": 64, "bos_token_id": 1, "eos_token_id": 2}
# Settings that classes have no default for, or whose default no published model uses.
_COMPLETED = {"dots1": {"n_routed_experts": 128}, "glm4_moe": {"head_dim": 128}}
_ACTIVATIONS = {
    "relu": "ReLU",
    "relu_squared": "squared ReLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU",
    "quick_gelu": "GELU",
    "silu": "SiLU",
}


def page() -> str:
    """Return docs/families.md; types with the same layers share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for model_type, configs in _networks().items():
        facts = tuple(" or ".join(filter(None, dict.fromkeys(map(fact, configs)))) for fact in _FACTS)
        rows.setdefault(facts, []).append(model_type)
    lines = [
        f"| {_names(types)} | {', '.join(filter(None, map(_example, types)))} | {' | '.join(facts)} |"
        for facts, types in sorted(rows.items(), key=lambda row: (_FORMS.index(row[0][0].split()[0]), row[1]))
    ]
    return f"{_HEAD}{_summary()}{_TABLE}{chr(10).join(lines)}\n"


def _summary() -> str:
    """Return the types of each form."""
    networks = _networks()
    rows = {
        form: sorted(one for one, configs in networks.items() if configs[0].form.split()[0] == form) for form in _FORMS
    }
    lines = [f"| {form} | {_names(types)} |" for form, types in rows.items()]
    lines.append(f"| the language model of {_WHOLES} | {_names(sorted(WHOLES))} |")
    return _SUMMARY + "".join(f"{line}\n" for line in lines)


def _names(types: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in types)


@cache
def _networks() -> dict[str, list[ModelConfig]]:
    """Return the networks of each type."""
    found = {model_type: list(_configs(model_type)) for model_type in FAMILIES}
    missing = [model_type for model_type, configs in found.items() if not configs]
    assert not missing, f"{', '.join(missing)}: transformers has no such type; add a row to tests/model/published_*.py"
    return found


def _example(model_type: str) -> str:
    return next(iter(_published(model_type)), "")


def _published(model_type: str) -> list[str]:
    return [name for name, row in PUBLISHED.items() if json.loads(row.config)["model_type"] == model_type]


def _configs(model_type: str) -> Iterator[ModelConfig]:
    """Yield the networks of a type: the one of its class's defaults, and the published ones."""
    if model_type == "transformer":
        yield config_from_raw(_TORCH)
    elif model_type in CONFIG_MAPPING:
        raw = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
        with suppress(ConfigError):  # the defaults of some classes are no valid model
            yield config_from_raw(raw | _COMPLETED.get(model_type, {}))
    for name in _published(model_type):
        yield config_from_raw(json.loads(PUBLISHED[name].config))


def _form(config: ModelConfig) -> str:
    if config.joint is not None:
        return f"{config.form} of texts, with a stack of images"
    reads = " of images" if config.image is not None else " of sounds" if config.audio is not None else ""
    return config.form + reads


def _layers(config: ModelConfig) -> Iterator[LayerConfig]:
    for stack in config.stacks.values():
        yield from stack.layers


def _joined(facts: Iterator[str] | list[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, facts)))


def _positions(config: ModelConfig) -> str:
    image = ["learned"] if config.image is not None else []
    return _joined([*image, *(one for stack in config.stacks.values() for one in _of_stack(stack))])


def _of_stack(stack: StackConfig) -> Iterator[str]:
    kinds = {PositionKind.LEARNED: "learned", PositionKind.SINUSOIDAL: "sinusoidal"}
    yield kinds.get(stack.position.kind, "")
    for layer in stack.layers:
        if isinstance(layer.mixer, AttentionConfig):
            yield _of_attention(layer.mixer)


def _of_attention(mixer: AttentionConfig) -> str:
    position = mixer.position
    if isinstance(position, RotaryConfig):
        rotated = position.dim if position.rotated is None else position.rotated
        return "rotary" if rotated == mixer.head_dim else "rotary in part"
    names = {AlibiConfig: "slopes of scores (ALiBi)", BucketBiasConfig: "bucketed bias"}
    names |= {XLNetRelativeConfig: "relative, with segments", DisentangledConfig: "disentangled"}
    return names.get(type(position), "")


def _norms(config: ModelConfig) -> str:
    return _joined(_of_layer(layer) for layer in _layers(config))


def _of_layer(layer: LayerConfig) -> str:
    norms = layer.norms[0]
    found = norms.pre or norms.post or norms.output
    if found is None:
        return ""
    place = (
        "one for parallel sublayers" if layer.one_norm else "parallel sublayers" if layer.parallel else _place(norms)
    )
    return f"{_norm(found)}, {place}"


def _norm(norm: NormConfig) -> str:
    kind = "RMS" if norm.kind is NormKind.RMS else "LayerNorm"
    return kind + (" around 1" if norm.unit_offset else "" if norm.gain else " without parameters")


def _place(norms: Norms) -> str:
    if norms.pre is not None:
        return "before and after" if norms.output is not None else "before"
    return "after the sum" if norms.post is not None else "after the sublayer"


def _mlps(config: ModelConfig) -> str:
    return _joined(_of_feed_forward(layer.feed_forward) for layer in _layers(config))


def _of_feed_forward(one: MLPConfig | ExpertsConfig) -> str:
    if isinstance(one, ExpertsConfig):
        return f"experts of {_of_feed_forward(one.mlp)}" + (", one shared" if one.shared is not None else "")
    name = "xIELU" if one.xielu else _ACTIVATIONS.get(one.activation, str(one.activation))
    return f"gated {name}" if one.gated else name


def _further(config: ModelConfig) -> str:
    """Return the rare features of a network."""
    mixers = [layer.mixer for layer in _layers(config)]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]
    windows = [attention.window is not None for attention in attentions]
    found = {
        "recurrent layers (Gated DeltaNet)": len(attentions) < len(mixers),
        "windows" if all(windows) else "windows in some layers": any(windows),
        "softcap of scores": any(attention.softcap for attention in attentions),
        "attention sinks": any(attention.sinks for attention in attentions),
        "norms of queries and keys": any(attention.qk_norm for attention in attentions),
        "layers share weights": any(layer.shares_weights_with is not None for layer in _layers(config)),
        "adapters of tasks": config.adapters is not None,
    }
    return ", ".join(name for name, is_found in found.items() if is_found)


_FACTS = (_form, _positions, _norms, _mlps, _further)

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
