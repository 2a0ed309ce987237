"""What GGUF calls an architecture's settings and tensors, and what `transformers` calls them.

One `Architecture` for each `general.architecture`: its metadata keys become config.json's, its tensors' names the
published ones, so that the families' tables do the rest. The names are those of llama.cpp's `gguf/constants.py` and
`tensor_mapping.py`; what its `conversion/` does to tensors (rows of heads in pairs, norms plus 1) is undone when they
are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Rope(StrEnum):
    """How an architecture's rotary settings are written to config.json."""

    NONE = "none"
    PLAIN = "plain"  # one set for all layers
    BY_TYPE = "by type"  # one for layers with windows, one for the others


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is translated. `{}` in a tensor's name is the layer."""

    model_type: str
    keys: Mapping[str, str]
    names: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that GGUF has no key for
    known: tuple[str, ...] = ()  # keys that `model.checkpoint.gguf.settings` looks at, or that change nothing
    rope: Rope = Rope.NONE
    rope_theta: float = 10_000.0  # without a key for it
    paired: tuple[str, ...] = ()  # tensors whose rows have the two halves of a head in turns
    norms_plus_one: bool = False
    encoder: bool = False  # attention in both directions, whatever the key says


_HARMLESS = (
    *("vocab_size", "tensor_data_layout", "attention.value_length", "rope.scaling.finetuned"),
    *("attention.causal", "pooling_type", "rope.dimension_count", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"),
)

_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_LLAMA_KEYS = {
    **_SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def _layers(before: str, names: Mapping[str, str], ours: str = "blk") -> dict[str, str]:
    """Names within a layer, which stands in `before`; GGUF calls the layer `ours`."""
    return {f"{ours}.{{}}.{name}": f"{before}.{theirs}" for name, theirs in names.items()}


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA_NAMES = {**_OUTSIDE, **_layers("model.layers.{}", {**_ATTENTION, **_GATED, **_PRE_NORMS})}
_GEMMA_NAMES = {**_OUTSIDE, **_layers("model.layers.{}", {**_ATTENTION, **_GATED, **_SANDWICH_NORMS})}
_PHI3_NAMES = {
    **_OUTSIDE,
    **_layers(
        "model.layers.{}",
        {
            **_PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
_BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **_layers(
        "encoder.layer.{}",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
}
_NOMIC_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    **_layers(
        "encoder.layers.{}",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
    ),
}


def _t5_stack(side: str, short: str) -> dict[str, str]:
    block = f"{side}.block.{{}}.layer"
    last = 2 if side == "decoder" else 1
    dense = f"{last}.DenseReluDense"
    names = {f"attn_{part}": f"0.SelfAttention.{part}" for part in "qkv"}
    names |= {"attn_o": "0.SelfAttention.o", "attn_rel_b": "0.SelfAttention.relative_attention_bias"}
    names |= {"attn_norm": "0.layer_norm", "ffn_norm": f"{last}.layer_norm", "ffn_down": f"{dense}.wo"}
    names |= {"ffn_gate": f"{dense}.wi_0", "ffn_up": f"{dense}.wi_1"}
    if side == "decoder":
        names |= {f"cross_attn_{part}": f"1.EncDecAttention.{part}" for part in "qkvo"}
        names |= {"cross_attn_norm": "1.layer_norm"}
    return {
        **_layers(block, names, f"{short}.blk"),
        f"{short}.output_norm": f"{side}.final_layer_norm",
    }


_T5_KEYS = {
    "embedding_length": "d_model",
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}
_T5_NAMES = {
    "token_embd": "shared",
    "output": "lm_head",
    **_t5_stack("encoder", "enc"),
    **_t5_stack("decoder", "dec"),
}
_T5_KNOWN = ("context_length", "attention.layer_norm_epsilon", "attention.head_count_kv")

_LLAMA = Architecture("llama", _LLAMA_KEYS, _LLAMA_NAMES, rope=Rope.PLAIN, paired=("attn_q", "attn_k"))
_QWEN2 = Architecture("qwen2", _LLAMA_KEYS, _LLAMA_NAMES, rope=Rope.PLAIN)
_GEMMA = Architecture("gemma", _LLAMA_KEYS, _LLAMA_NAMES, rope=Rope.PLAIN, norms_plus_one=True)
_GEMMA2 = Architecture(
    "gemma2",
    {
        **_LLAMA_KEYS,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    _GEMMA_NAMES,
    rope=Rope.PLAIN,
    norms_plus_one=True,
)
_GEMMA3_KEYS = {
    **_LLAMA_KEYS,
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_GEMMA3_KNOWN = ("rope.freq_base_swa", "attention.sliding_window_pattern")
_GEMMA3 = Architecture(
    "gemma3_text",
    _GEMMA3_KEYS,
    _GEMMA_NAMES,
    known=_GEMMA3_KNOWN,
    rope=Rope.BY_TYPE,
    rope_theta=1_000_000.0,
    norms_plus_one=True,
)
_WINDOWS = ("rope.freq_base_swa", "attention.sliding_window", "attention.sliding_window_pattern")
_LAYER_NORM_KEYS = {key: name for key, name in _LLAMA_KEYS.items() if name != "rms_norm_eps"}
_OUTPUT_NORMS = {name: theirs for name, theirs in _SANDWICH_NORMS.items() if name.startswith("post_")}
_OUTPUT_NORM_NAMES = {**_OUTSIDE, **_layers("model.layers.{}", {**_ATTENTION, **_GATED, **_OUTPUT_NORMS})}
_STARCODER2_NAMES = {
    **_OUTSIDE,
    **_layers("model.layers.{}", {**_ATTENTION, **_PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
_PHI_NAMES = {
    **_OUTSIDE,
    "output_norm": "model.final_layernorm",
    **_layers(
        "model.layers.{}",
        {
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
}
_BERT_KEYS = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}


def _with_experts(within: str, router: str, experts: tuple[str, str, str]) -> dict[str, str]:
    """Names of Llama's layers with experts, of which one tensor has all: `{}` stays in a name for the expert's number.

    `within` is what holds the experts, `experts` are the names of a gate, an up and a down projection.
    """
    parts = zip(("gate", "up", "down"), experts, strict=True)
    names = {f"ffn_{part}_exps": f"{within}.experts.{{{{}}}}.{name}" for part, name in parts}
    shared = {f"ffn_{part}_shexp": f"{within}.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    routers = {"ffn_gate_inp": f"{within}.{router}", "ffn_gate_inp_shexp": f"{within}.shared_expert_gate"}
    return {**_LLAMA_NAMES, **_layers("model.layers.{}", {**names, **shared, **routers})}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_CHOSEN = {"expert_used_count": "num_experts_per_tok"}
_LLAMA_EXPERTS = {**_LLAMA_KEYS, **_CHOSEN, "expert_count": "num_local_experts"}
_QWEN_EXPERTS = {
    **{**_LLAMA_KEYS, **_CHOSEN, "expert_count": "num_experts"},
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
MIXTRAL = Architecture(  # which calls itself llama
    "mixtral",
    _LLAMA_EXPERTS,
    _with_experts("block_sparse_moe", "gate", ("w1", "w3", "w2")),
    rope=Rope.PLAIN,
    paired=("attn_q", "attn_k"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": Architecture("qwen3", _LLAMA_KEYS, _LLAMA_NAMES, rope=Rope.PLAIN),
    "phi3": Architecture(
        "phi3", {**_LLAMA_KEYS, "attention.sliding_window": "sliding_window"}, _PHI3_NAMES, rope=Rope.PLAIN
    ),
    "granite": Architecture(
        "granite",
        {**_LLAMA_KEYS, **_GRANITE_SCALES},
        _LLAMA_NAMES,
        rope=Rope.PLAIN,
        paired=("attn_q", "attn_k"),
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {**_LLAMA_EXPERTS, **_GRANITE_SCALES},
        _with_experts("block_sparse_moe", "router.layer", _PROJECTIONS),
        rope=Rope.PLAIN,
        paired=("attn_q", "attn_k"),
    ),
    # Whether scores are divided by the sum of the chosen ones stands in llama.cpp's code.
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        _with_experts("mlp", "gate", _PROJECTIONS),
        constants={"norm_topk_prob": False},
        rope=Rope.PLAIN,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _QWEN_EXPERTS,
        _with_experts("mlp", "gate", _PROJECTIONS),
        constants={"norm_topk_prob": True},
        rope=Rope.PLAIN,
    ),
    "olmoe": Architecture(
        "olmoe",
        {**_LLAMA_KEYS, **_CHOSEN, "expert_count": "num_experts"},
        _with_experts("mlp", "gate", _PROJECTIONS),
        constants={"norm_topk_prob": False},
        rope=Rope.PLAIN,
    ),
    "smollm3": Architecture("smollm3", _LLAMA_KEYS, _LLAMA_NAMES, rope=Rope.PLAIN, paired=("attn_q", "attn_k")),
    "olmo2": Architecture("olmo2", _LLAMA_KEYS, _OUTPUT_NORM_NAMES, known=_WINDOWS, rope=Rope.PLAIN),
    "exaone4": Architecture("exaone4", _LLAMA_KEYS, _OUTPUT_NORM_NAMES, known=_WINDOWS, rope=Rope.PLAIN),
    "command-r": Architecture(
        "cohere",
        {**_LAYER_NORM_KEYS, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        _LLAMA_NAMES,
        rope=Rope.PLAIN,
    ),
    "stablelm": Architecture(
        "stablelm",
        {
            **_LAYER_NORM_KEYS,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        _LLAMA_NAMES,
        rope=Rope.PLAIN,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_LAYER_NORM_KEYS, "attention.layer_norm_epsilon": "norm_epsilon"},
        _STARCODER2_NAMES,
        {"sliding_window": None},
        rope=Rope.PLAIN,
    ),
    "phi2": Architecture(
        "phi",
        {**_LAYER_NORM_KEYS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        _PHI_NAMES,
        rope=Rope.PLAIN,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma-embedding": Architecture(
        "gemma3_text",
        _GEMMA3_KEYS,
        _GEMMA_NAMES,
        {"use_bidirectional_attention": True},
        known=_GEMMA3_KNOWN,
        rope=Rope.BY_TYPE,
        rope_theta=1_000_000.0,
        norms_plus_one=True,
        encoder=True,
    ),
    "bert": Architecture("bert", _BERT_KEYS, _BERT_NAMES, known=("attention.head_count_kv",), encoder=True),
    "nomic-bert": Architecture(
        "nomic_bert",
        {**_BERT_KEYS, "attention.key_length": "head_dim"},
        _NOMIC_NAMES,
        {"hidden_act": "silu"},
        known=("attention.head_count_kv",),
        rope=Rope.PLAIN,
        rope_theta=1000.0,
        encoder=True,
    ),
    "t5": Architecture(
        "t5", _T5_KEYS, _T5_NAMES, {"relative_attention_max_distance": 128}, known=_T5_KNOWN, encoder=True
    ),
    "t5encoder": Architecture(
        "t5",
        _T5_KEYS,
        _T5_NAMES,
        {"relative_attention_max_distance": 128, "architectures": ["T5EncoderModel"]},
        known=_T5_KNOWN,
        encoder=True,
    ),
}
HARMLESS_KEYS = _HARMLESS
# Tensors that metadata of the other kind repeat: rotary factors, which become settings.
DROPPED_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
