"""A GGUF file's metadata as the settings of a config.json, which a family's table reads.

Metadata that would change the network and is not known here is refused by its key.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from model.api.request import Pooling
from model.checkpoint.gguf.architectures import ARCHITECTURES, HARMLESS_KEYS, MIXTRAL, Architecture, Rope
from model.checkpoint.gguf.rope_factors import llama3_settings, read_floats
from model.errors import ConfigError
from model.gguf.container import GGUFModel, shown

# Texts of tokens that end an output beside the one that the metadata names, as llama.cpp has them (llama-vocab.cpp).
_ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> [EOT] [EOS]
    <|end_of_text|> <end_of_utterance> <eos> <turn|>""".split()  # noqa: SIM905
)
_CONTROL, _USER_DEFINED = 3, 4
_POOLING = {0: None, 1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def architecture_of(model: GGUFModel) -> Architecture:
    """Return the table of the file's architecture; raises `ConfigError` for one that is not served."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{model.name}: general.architecture {name!r} is not served; served are {', '.join(ARCHITECTURES)}"
        )
    return MIXTRAL if name == "llama" and model.get("llama.expert_count") else ARCHITECTURES[name]


def raw_settings(model: GGUFModel) -> dict[str, Any]:
    """Return the settings as a config.json has them; raises `ConfigError`."""
    return network_settings(model) | _token_ids(model)


def network_settings(model: GGUFModel) -> dict[str, Any]:
    """Return those of the network, for which no vocabulary is read; raises `ConfigError`."""
    try:
        return _network_settings(model)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{model.name}: its metadata has a value of the wrong kind: {error}") from None


def _network_settings(model: GGUFModel) -> dict[str, Any]:
    architecture, name = architecture_of(model), model.architecture
    known = {*architecture.keys, *architecture.known, *HARMLESS_KEYS}
    own = {key.removeprefix(f"{name}.") for key in model if key.startswith(f"{name}.")}
    if unknown := sorted(key for key in own - known if model.get(f"{name}.{key}")):
        found = shown(model.get(f"{name}.{unknown[0]}"))
        raise ConfigError(f"{model.name}: {name}.{unknown[0]} is not served: {found}")
    raw = {"model_type": architecture.model_type, **architecture.constants}
    for key, setting in architecture.keys.items():
        if (value := _single(model, f"{name}.{key}")) is not None:
            raw[setting] = value
    raw["vocab_size"] = _rows(model, "token_embd.weight")
    if architecture.encoder:
        if model.get(f"{name}.attention.causal", False):
            raise ConfigError(f"{model.name}: {name}.attention.causal must be false of this architecture")
    elif model.get(f"{name}.attention.causal", True) is False:
        raw["is_causal"] = False
    raw |= _rope(model, architecture, raw)
    return raw | _MORE.get(architecture.model_type, _nothing)(model, raw)


def recommended_sampling(model: GGUFModel) -> dict[str, Any]:
    """Return the sampling that its authors recommend, as a generation_config.json has it."""
    found = {ours: _single(model, f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    found["repetition_penalty"] = _single(model, "general.sampling.penalty_repeat")
    found = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, "top_k": 0, **found} if found else {}


def pooling(model: GGUFModel) -> Pooling | None:
    """Return how an embedder makes one vector of a text; None: the metadata says nothing of it."""
    key = f"{model.architecture}.pooling_type"
    found = model.integer(key, 0)
    if found not in _POOLING:
        raise ConfigError(f"{model.name}: {key} {found} is not served; served are 1 (mean), 2 (cls) and 3 (last)")
    return _POOLING[found]


def _single(model: GGUFModel, key: str) -> Any:
    """Return a value; one for each layer must be the same for all of them."""
    value = model.get(key)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ConfigError(f"{model.name}: {key} differs from layer to layer, which is not served")
        value = value[0] if value else None
    return _decimal(value) if isinstance(value, float) else value


def _decimal(value: float) -> float:
    """Return the shortest decimal number that is this one in float32: metadata has 1e-6 as 9.99999997e-07."""
    stored = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if struct.pack("<f", short) == stored), value)


def _rows(model: GGUFModel, tensor: str) -> int:
    if tensor not in model.tensors:
        raise ConfigError(f"{model.name}: the tensor {tensor} is missing")
    return model.tensors[tensor].shape[0]


def _has(model: GGUFModel, ending: str) -> bool:
    return any(name.endswith(ending) for name in model.tensors)


def _head_dim(model: GGUFModel, raw: Mapping[str, Any]) -> int:
    """Return the width of a head; of keys and values alike."""
    name = model.architecture
    try:
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    except (KeyError, TypeError, ZeroDivisionError):
        raise ConfigError(f"{model.name}: {name}.embedding_length or {name}.attention.head_count is missing") from None
    values = model.get(f"{name}.attention.value_length", dim)
    if values != dim:
        raise ConfigError(f"{model.name}: {name}.attention.value_length {values} must be that of keys, {dim}")
    return int(dim)


def _rope(model: GGUFModel, architecture: Architecture, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`."""
    if architecture.rope is Rope.NONE:
        return {}
    name, dim = model.architecture, _head_dim(model, raw)
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _single(model, f"{name}.rope.freq_base") or architecture.rope_theta,
    }
    found |= _scaling(model, found["rope_theta"], dim)
    rotated = model.integer(f"{name}.rope.dimension_count")
    if rotated is not None:
        if not 0 <= rotated <= dim:
            raise ConfigError(f"{model.name}: {name}.rope.dimension_count {rotated} must be from 0 to a head's {dim}")
        share = rotated / dim
        while int(dim * share) < rotated:  # the table computes back
            share = math.nextafter(share, 2)
        found["partial_rotary_factor"] = share
    if architecture.rope is Rope.PLAIN:
        return {"rope_parameters": found}
    local = {"rope_type": "default", "rope_theta": _single(model, f"{name}.rope.freq_base_swa") or 10_000.0}
    return {"rope_parameters": {"full_attention": found, "sliding_attention": local}}


def _scaling(model: GGUFModel, theta: float, dim: int) -> dict[str, Any]:
    """Return how positions are scaled."""
    where = f"{model.architecture}.rope.scaling"
    kind, factor = model.get(f"{where}.type", "none"), _single(model, f"{where}.factor") or 0.0
    temperature = _single(model, f"{where}.attn_factor")
    if temperature not in (None, 1.0) and "rope_factors_long.weight" not in model.tensors:
        raise ConfigError(f"{model.name}: {where}.attn_factor {temperature} is not served without rope_factors_long")
    if "rope_freqs.weight" in model.tensors:
        if kind != "none":
            raise ConfigError(f"{model.name}: {where}.type {kind!r} beside the tensor rope_freqs is not served")
        return llama3_settings(read_floats(model.tensors["rope_freqs.weight"]), theta, dim, model.name)
    if "rope_factors_long.weight" in model.tensors:
        return _longrope(model, where)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{model.name}: {where}.type {kind!r} is not served; served are none, linear and yarn")
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_attn_factor": "attention_factor",
    }
    found |= {ours: value for key, ours in names.items() if (value := _single(model, f"{where}.{key}")) is not None}
    return found


def _longrope(model: GGUFModel, where: str) -> dict[str, Any]:
    """Return what Phi-3 stretches each frequency by, within the context of its training and beyond it."""
    factors = {}
    for kind in ("short", "long"):
        name = f"rope_factors_{kind}.weight"
        if name not in model.tensors:
            raise ConfigError(f"{model.name}: the tensor {name} is missing")
        factors[f"{kind}_factor"] = list(map(_decimal, read_floats(model.tensors[name])))
    found: dict[str, Any] = {"rope_type": "longrope", **factors}
    found["original_max_position_embeddings"] = original = model.integer(f"{where}.original_context_length")
    longest, temperature = model.integer(f"{model.architecture}.context_length"), _single(model, f"{where}.attn_factor")
    if temperature and original and longest and original < longest:  # which the table computes by itself
        usual = math.sqrt(1 + math.log(longest / original) / math.log(original))
        found |= {} if math.isclose(temperature, usual, rel_tol=1e-6) else {"attention_factor": temperature}
    return found


def _nothing(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _llama(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True} if _has(model, ".attn_output.bias") else {}


def _gemma(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 2 and 3: the scale of scores is the head's, but of the 27B ones, which llama.cpp knows by their layers."""
    dim = _head_dim(model, raw)
    whole = raw.get("num_hidden_layers") == {"gemma2": 46, "gemma3_text": 62}[raw["model_type"]]
    found = {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if whole else dim}
    if raw["model_type"] == "gemma2":
        return found
    pattern = model.get(f"{model.architecture}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        return {**found, "layer_types": _layer_types(pattern)}
    return {**found, "sliding_window_pattern": pattern}


def _windows(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 2 and EXAONE 4: with a window in some of the layers they are others; OLMo's windows stretch nothing."""
    where = f"{model.architecture}.attention"
    window = model.integer(f"{where}.sliding_window")
    if not window:
        return {"sliding_window": None} if raw["model_type"] == "exaone4" else {}
    theta, own = raw["rope_parameters"]["rope_theta"], _single(model, f"{model.architecture}.rope.freq_base_swa")
    if own not in (None, theta):
        raise ConfigError(
            f"{model.name}: {model.architecture}.rope.freq_base_swa {own} must be rope.freq_base, {theta}"
        )
    found: dict[str, Any] = {"sliding_window": window}
    if pattern := model.array(f"{where}.sliding_window_pattern"):
        found["layer_types"] = _layer_types(pattern)
    if raw["model_type"] == "olmo2":
        plain = {"rope_type": "default", "rope_theta": theta}
        ropes = {"full_attention": raw["rope_parameters"], "sliding_attention": plain}
        found |= {"model_type": "olmo3", "rope_parameters": ropes}
    return found


def _layer_types(slides: Sequence[Any]) -> list[str]:
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _cohere(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": True} if _has(model, ".attn_q_norm.weight") else {}


def _stablelm(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qkv_bias": _has(model, ".attn_q.bias")}


def _phi3(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": raw.get("sliding_window") or None}


def _segments(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """BERT: positions begin at 0, also of a RoBERTa, whose first rows the conversion leaves out."""
    types = _rows(model, "token_types.weight") if "token_types.weight" in model.tensors else 0
    return {"type_vocab_size": types}


def _t5(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "feed_forward_proj": "gated-gelu" if _has(model, ".ffn_gate.weight") else "relu",
        "tie_word_embeddings": "output.weight" not in model.tensors,
    }
    every_layer = _has(model, "blk.1.attn_rel_b.weight")  # umT5: a bias of its own in each layer
    return {**found, "model_type": "umt5"} if every_layer else found


_MORE = {
    "llama": _llama,
    "granite": _llama,
    "smollm3": _llama,
    "olmo2": _windows,
    "exaone4": _windows,
    "cohere": _cohere,
    "stablelm": _stablelm,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "bert": _segments,
    "nomic_bert": _segments,
    "t5": _t5,
}


def _token_ids(model: GGUFModel) -> dict[str, Any]:
    """Return the ids of tokens with a meaning; every token that ends an output in llama.cpp does here."""
    tokenizer = "tokenizer.ggml"
    found: dict[str, Any] = {
        "bos_token_id": model.integer(f"{tokenizer}.bos_token_id"),
        "pad_token_id": model.integer(f"{tokenizer}.padding_token_id"),
    }
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {model.integer(f"{tokenizer}.{name}"): None for name in names}
    types = model.array(f"{tokenizer}.token_type")
    special = {token for token, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    if special and architecture_of(model).model_type not in ("bert", "nomic_bert"):
        texts = model.array(f"{tokenizer}.tokens")
        ends |= {token: None for token in sorted(special) if token < len(texts) and texts[token] in _ENDS}
    found["eos_token_id"] = [token for token in ends if token is not None] or None
    return {name: value for name, value in found.items() if value is not None}
