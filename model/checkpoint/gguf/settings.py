"""A GGUF file's metadata as the settings of a config.json, which a family's table reads.

Metadata that would change the network and is not known here is refused by its key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from triptych.model.api.request import Pooling
from triptych.model.checkpoint.gguf.architectures import ARCHITECTURES, HARMLESS_KEYS, VARIANTS
from triptych.model.checkpoint.gguf.metadata import (
    decimal,
    factor_settings,
    head_dim,
    read_floats,
    refuse_other,
    rows,
    single,
)
from triptych.model.checkpoint.gguf.table import Architecture, Rope
from triptych.model.errors import ConfigError
from triptych.model.families.table.blamed_keys import MissingKeyError
from triptych.model.gguf.container import GGUFModel, shown
from triptych.model.gguf.paths import OTHER_PURPOSES

# Texts of tokens that end an output too, whatever the metadata names, as in llama.cpp (llama-vocab.cpp).
_ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>""".split()  # noqa: SIM905
)
_END_OF_SENTENCE = "</s>"  # if it is a control token: Gemma has HTML's of that name
# Where a vocabulary has both of a pair (gpt-oss, Solar), an output has several parts and this one ends a part.
_END_OF_PART, _WITH_PARTS = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_CONTROL, _USER_DEFINED = 3, 4
_NO_TOKEN = (-1, (1 << 32) - 1)
_log = logging.getLogger(__name__)
_POOLING = {0: None, 1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def architecture_of(model: GGUFModel) -> Architecture:
    """Return the table of the file's architecture; raises `ConfigError` for one that is not served, or no model."""
    kind = "mmproj" if model.get("general.architecture") == "clip" else model.get("general.type")
    if isinstance(kind, str) and kind in OTHER_PURPOSES:
        raise ConfigError(f"{model.name}: the file is {OTHER_PURPOSES[kind]}")
    name = model.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{model.name}: general.architecture {name!r} is not served; served are {', '.join(ARCHITECTURES)}"
        )
    if not model.tensors:
        raise ConfigError(f"{model.name}: the file is {OTHER_PURPOSES['vocab']}")
    if name in VARIANTS and VARIANTS[name][0](model):
        return VARIANTS[name][1]
    return ARCHITECTURES[name]


def raw_settings(model: GGUFModel) -> dict[str, Any]:
    """Return the settings as a config.json has them; raises `ConfigError`."""
    return network_settings(model) | _token_ids(model)


def network_settings(model: GGUFModel) -> dict[str, Any]:
    """Return those of the network, for which no vocabulary is read; raises `ConfigError`."""
    try:
        with named_by_metadata(model):
            return _network_settings(model)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{model.name}: its metadata has a value of the wrong kind: {error}") from None


@contextmanager
def named_by_metadata(model: GGUFModel) -> Iterator[None]:
    """Turn the lack of a setting into a `ConfigError` that names the metadata's key, not config.json's."""
    try:
        yield
    except (KeyError, MissingKeyError) as error:
        setting = error.key if isinstance(error, MissingKeyError) else str(error.args[0])
        keys = [f"{model.architecture}.{key}" for key, ours in architecture_of(model).keys.items() if ours == setting]
        raise ConfigError(f"{model.name}: {' or '.join(keys) or setting} is missing in its metadata") from None


def _network_settings(model: GGUFModel) -> dict[str, Any]:
    architecture, name = architecture_of(model), model.architecture
    known = {*architecture.keys, *architecture.known, *HARMLESS_KEYS}
    own = {key.removeprefix(f"{name}.") for key in model if key.startswith(f"{name}.")}
    if unknown := sorted(key for key in own - known if model.get(f"{name}.{key}")):
        found = shown(model.get(f"{name}.{unknown[0]}"))
        raise ConfigError(f"{model.name}: {name}.{unknown[0]} is not served: {found}")
    raw = {"model_type": architecture.model_type, **architecture.constants}
    for key, setting in architecture.keys.items():
        if (value := single(model, f"{name}.{key}")) is not None:
            raw[setting] = value
    if "attention.key_length" in architecture.keys and "head_dim" not in raw and raw.get("num_attention_heads"):
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]  # whatever a family's class takes
    if further := model.integer(f"{name}.nextn_predict_layers"):  # in the end, which are not served
        raw["num_hidden_layers"] -= further
    raw["vocab_size"] = rows(model, "token_embd.weight")
    if architecture.encoder:
        if model.get(f"{name}.attention.causal", False):
            raise ConfigError(f"{model.name}: {name}.attention.causal must be false of this architecture")
    elif model.get(f"{name}.attention.causal", True) is False:
        raw["is_causal"] = False
    raw |= _rope(model, architecture, raw)
    return raw | architecture.more(model, raw)


def recommended_sampling(model: GGUFModel) -> dict[str, Any]:
    """Return the sampling that its authors recommend, as a generation_config.json has it."""
    found = {ours: single(model, f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    found["repetition_penalty"] = single(model, "general.sampling.penalty_repeat")
    found = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, "top_k": 0, **found} if found else {}


def pooling(model: GGUFModel) -> Pooling | None:
    """Return how an embedder makes one vector of a text; None: the metadata says nothing of it."""
    key = f"{model.architecture}.pooling_type"
    found = model.integer(key, 0)
    if found not in _POOLING:
        raise ConfigError(f"{model.name}: {key} {found} is not served; served are 1 (mean), 2 (cls) and 3 (last)")
    return _POOLING[found]


def _rope(model: GGUFModel, architecture: Architecture, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`."""
    if architecture.rope is Rope.NONE:
        return {}
    name, dim = model.architecture, head_dim(model, raw)
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": single(model, f"{name}.rope.freq_base") or architecture.rope_theta,
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
    local = {"rope_type": "default", "rope_theta": single(model, f"{name}.rope.freq_base_swa") or 10_000.0}
    return {"rope_parameters": {"full_attention": found, "sliding_attention": local}}


def _scaling(model: GGUFModel, theta: float, dim: int) -> dict[str, Any]:
    """Return how positions are scaled."""
    where = f"{model.architecture}.rope.scaling"
    factor = single(model, f"{where}.factor") or single(model, f"{model.architecture}.rope.scale_linear") or 0.0
    kind = model.get(f"{where}.type", "linear" if factor else "none")  # as in llama.cpp
    refuse_other(model, f"{where}.yarn_ext_factor", 1.0)
    temperature = single(model, f"{where}.attn_factor")
    if temperature not in (None, 1.0) and "rope_factors_long.weight" not in model.tensors:
        raise ConfigError(f"{model.name}: {where}.attn_factor {temperature} is not served without rope_factors_long")
    if "rope_freqs.weight" in model.tensors:
        if kind != "none":
            raise ConfigError(f"{model.name}: {where}.type {kind!r} with the tensor rope_freqs is not served")
        context = model.integer(f"{model.architecture}.context_length")
        return factor_settings(read_floats(model.tensors["rope_freqs.weight"]), theta, dim, context, model.name)
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
    found |= {ours: value for key, ours in names.items() if (value := single(model, f"{where}.{key}")) is not None}
    return found


def _longrope(model: GGUFModel, where: str) -> dict[str, Any]:
    """Return what Phi-3 stretches each frequency by, within the context of its training and beyond it."""
    factors = {}
    for kind in ("short", "long"):
        name = f"rope_factors_{kind}.weight"
        if name not in model.tensors:
            raise ConfigError(f"{model.name}: the tensor {name} is missing")
        factors[f"{kind}_factor"] = list(map(decimal, read_floats(model.tensors[name])))
    found: dict[str, Any] = {"rope_type": "longrope", **factors}
    found["original_max_position_embeddings"] = original = model.integer(f"{where}.original_context_length")
    longest, temperature = model.integer(f"{model.architecture}.context_length"), single(model, f"{where}.attn_factor")
    if temperature and original and longest and original < longest:  # which the table computes by itself
        usual = math.sqrt(1 + math.log(longest / original) / math.log(original))
        found |= {} if math.isclose(temperature, usual, rel_tol=1e-6) else {"attention_factor": temperature}
    return found


def _token_ids(model: GGUFModel) -> dict[str, Any]:
    """Return the ids of tokens with a meaning; every token that ends an output in llama.cpp does here."""
    tokenizer = "tokenizer.ggml"
    found: dict[str, Any] = {
        "bos_token_id": _token(model, f"{tokenizer}.bos_token_id"),
        "pad_token_id": _token(model, f"{tokenizer}.padding_token_id"),
    }
    ends = dict.fromkeys(_token(model, f"{tokenizer}.{name}_token_id") for name in ("eos", "eot", "eom"))
    if architecture_of(model).model_type not in ("bert", "nomic_bert", "modernbert"):
        named = _ends_by_text(model)
        ends |= dict.fromkeys(named)
        if any(pair <= set(named.values()) for pair in _WITH_PARTS):
            ends = {token: None for token in ends if named.get(token) != _END_OF_PART}
    found["eos_token_id"] = [token for token in ends if token is not None] or None
    return {name: value for name, value in found.items() if value is not None}


def _ends_by_text(model: GGUFModel) -> dict[int | None, str]:
    """Return the special tokens whose texts say that they end an output, with these texts."""
    found: dict[int | None, str] = {}
    types, texts = model.array("tokenizer.ggml.token_type"), model.array("tokenizer.ggml.tokens")
    for token, (kind, text) in enumerate(zip(types, texts, strict=False)):
        ends = text in _ENDS or (text == _END_OF_SENTENCE and kind == _CONTROL)
        if kind in (_CONTROL, _USER_DEFINED) and ends:
            found[token] = text
    return found


def _token(model: GGUFModel, key: str) -> int | None:
    """Return a token's id; None where there is none. As in llama.cpp an id beyond the vocabulary is none."""
    found = model.integer(key)
    if found is None or 0 <= found < rows(model, "token_embd.weight"):
        return found
    if found not in _NO_TOKEN:
        _log.warning("%s: %s %d is beyond the vocabulary, and ignored", model.name, key, found)
    return None
