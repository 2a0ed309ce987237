"""Settings that a GGUF file has no key for, or says otherwise than config.json does, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.model.checkpoint.gguf.metadata import has, head_dim, layer_types, rows, single
from triptych.model.errors import ConfigError
from triptych.model.gguf.container import GGUFModel

Raw = Mapping[str, Any]


def llama(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """Read which projections have biases from their tensors; biases of q, k and v alone are a network of Qwen2."""
    found: dict[str, Any] = {"mlp_bias": True} if has(model, ".ffn_down.bias") else {}
    if has(model, ".attn_output.bias"):
        return {**found, "attention_bias": True}
    return {"model_type": "qwen2"} if raw["model_type"] == "llama" and has(model, ".attn_q.bias") else found


def gemma(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """Gemma 2 and 3: the scale of scores is the head's, but of the 27B ones, which llama.cpp knows by their layers."""
    dim = head_dim(model, raw)
    whole = raw.get("num_hidden_layers") == {"gemma2": 46, "gemma3_text": 62}[raw["model_type"]]
    found = {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if whole else dim}
    if raw["model_type"] == "gemma2":
        return found
    pattern = model.get(f"{model.architecture}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        return {**found, "layer_types": layer_types(pattern)}
    return {**found, "sliding_window_pattern": pattern}


def windows(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """OLMo 2 and EXAONE 4: with a window in some of the layers they are others; OLMo's windows stretch nothing."""
    where = f"{model.architecture}.attention"
    window = model.integer(f"{where}.sliding_window")
    if not window:
        return {"sliding_window": None} if raw["model_type"] == "exaone4" else {}
    theta, own = raw["rope_parameters"]["rope_theta"], single(model, f"{model.architecture}.rope.freq_base_swa")
    if own not in (None, theta):
        raise ConfigError(
            f"{model.name}: {model.architecture}.rope.freq_base_swa {own} must be rope.freq_base, {theta}"
        )
    found: dict[str, Any] = {"sliding_window": window}
    if pattern := model.array(f"{where}.sliding_window_pattern"):
        found["layer_types"] = layer_types(pattern)
    if raw["model_type"] == "olmo2":
        plain = {"rope_type": "default", "rope_theta": theta}
        ropes = {"full_attention": raw["rope_parameters"], "sliding_attention": plain}
        found |= {"model_type": "olmo3", "rope_parameters": ropes}
    return found


def cohere(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    return {"use_qk_norm": True} if has(model, ".attn_q_norm.weight") else {}


def stablelm(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    return {"use_qkv_bias": has(model, ".attn_q.bias")}


def phi3(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    return {"sliding_window": raw.get("sliding_window") or None}


def segments(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """BERT: positions begin at 0, also of a RoBERTa, whose first rows the conversion leaves out."""
    types = rows(model, "token_types.weight") if "token_types.weight" in model.tensors else 0
    return {"type_vocab_size": types}


def t5(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    found: dict[str, Any] = {
        "feed_forward_proj": "gated-gelu" if has(model, ".ffn_gate.weight") else "relu",
        "tie_word_embeddings": "output.weight" not in model.tensors,
    }
    every_layer = has(model, "blk.1.attn_rel_b.weight")  # umT5: a bias of its own in each layer
    return {**found, "model_type": "umt5"} if every_layer else found


def biases(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """Return which projections have biases, by their tensors."""
    return {
        "attention_bias": has(model, ".attn_q.bias"),
        **({"attention_out_bias": has(model, ".attn_output.bias")} if raw["model_type"] == "seed_oss" else {}),
        **({"mlp_bias": has(model, ".ffn_up.bias")} if raw["model_type"] not in ("glm", "glm4") else {}),
    }


def ernie(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    return {"use_bias": has(model, ".attn_q.bias")}


def mistral3(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """Mistral Small 3.1 and later, or Ministral 3, whose queries grow with their position."""
    growth, rope = single(model, f"{model.architecture}.attention.temperature_scale"), raw["rope_parameters"]
    scale = single(model, f"{model.architecture}.rope.scaling.yarn_log_multiplier")
    if scale and rope["rope_type"] == "yarn":
        rope = {**rope, "mscale": scale, "mscale_all_dim": scale}
    if not growth:
        return {"sliding_window": None, "rope_parameters": rope}
    return {"model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": growth}}


def gpt_oss(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """The ends of YaRN's ramp are not rounded to whole pairs."""
    rope = raw["rope_parameters"]
    return {"rope_parameters": {**rope, "truncate": False}} if rope["rope_type"] == "yarn" else {}
