"""Further mixtures of experts in GGUF: GLM-4.5, dots.llm1, ERNIE 4.5, MiniMax-M2, Phi-3.5-MoE and HunYuan-A13B.

Their routers choose by scores with learned biases, or by SparseMixer; HunYuan's by softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.model.checkpoint.gguf import family_settings
from triptych.model.checkpoint.gguf.metadata import has, refuse_other, single
from triptych.model.checkpoint.gguf.table import CHOSEN_EXPERTS, LLAMA_KEYS, Architecture, Change, Rope, with_experts
from triptych.model.gguf.container import GGUFModel

Raw = Mapping[str, Any]
_SIGMOID = 2  # of `expert_gating_func`, in llama.cpp's numbers
_W = ("w1", "w3", "w2")
_SCORED_KEYS = {
    **LLAMA_KEYS,
    **CHOSEN_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
# The defaults of llama.cpp.
_SCORED = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0}
_SCORED_NAMES = {
    **with_experts("mlp", "gate", shared="shared_experts"),
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}
_GLM_NAMES = {**_SCORED_NAMES, "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm"}


def _scored(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    refuse_other(model, f"{model.architecture}.expert_gating_func", _SIGMOID)
    return {}


def _glm4_moe(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    found = {"attention_bias": has(model, ".attn_q.bias"), "use_qk_norm": has(model, ".attn_q_norm.weight")}
    return _scored(model, raw) | found


def _phimoe(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """Its file has one temperature of rotary positions, for every length."""
    found = {
        "attention_bias": has(model, ".attn_output.bias"),
        "lm_head_bias": "output.bias" in model.tensors,
        "sliding_window": raw.get("sliding_window") or None,
    }
    rope = {name: value for name, value in raw["rope_parameters"].items() if name != "attention_factor"}
    if rope["rope_type"] != "default":
        temperature = single(model, f"{model.architecture}.rope.scaling.attn_factor") or 1.0
        rope |= {"short_mscale": temperature, "long_mscale": temperature}
    return found | {"rope_parameters": rope}


def _hunyuan(model: GGUFModel, raw: Raw) -> dict[str, Any]:
    """The shared expert is as wide as the others."""
    refuse_other(model, f"{model.architecture}.expert_shared_count", 1)
    refuse_other(model, f"{model.architecture}.expert_shared_feed_forward_length", raw.get("intermediate_size"))
    return {}


MORE_EXPERTS = {
    "glm4moe": Architecture(
        "glm4_moe",
        _SCORED_KEYS,
        _GLM_NAMES,
        _SCORED,
        known=("expert_gating_func",),
        rope=Rope.PLAIN,
        more=_glm4_moe,
    ),
    "dots1": Architecture(
        "dots1",
        _SCORED_KEYS,
        _SCORED_NAMES,
        {**_SCORED, "sliding_window": None},
        known=("expert_gating_func",),
        rope=Rope.PLAIN,
        more=_scored,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **LLAMA_KEYS,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
        },
        {
            **with_experts("mlp", "gate", shared="shared_experts"),
            "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.moe_statics.e_score_correction_bias",
        },
        {"moe_num_shared_experts": 0},
        known=("expert_shared_feed_forward_length",),
        rope=Rope.PLAIN,
        more=family_settings.ernie,
        changes=lambda raw: {"exp_probs_b": Change(shape=(1, raw["moe_num_experts"]))},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            **{**LLAMA_KEYS, **CHOSEN_EXPERTS, "expert_count": "num_local_experts"},
            "expert_feed_forward_length": "intermediate_size",
        },
        {
            **with_experts("block_sparse_moe", "gate", _W),
            "blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
        },
        known=("expert_gating_func",),
        rope=Rope.PLAIN,
        more=_scored,
    ),
    "phimoe": Architecture(
        "phimoe",
        {
            **{**LLAMA_KEYS, **CHOSEN_EXPERTS, "expert_count": "num_local_experts"},
            "attention.sliding_window": "sliding_window",
        },
        with_experts("block_sparse_moe", "gate", _W),
        rope=Rope.PLAIN,
        more=_phimoe,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {
            **LLAMA_KEYS,
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
        },
        {
            **with_experts("mlp", "gate.wg", shared="shared_mlp"),
            "blk.{}.attn_q_norm": "model.layers.{}.self_attn.query_layernorm",
            "blk.{}.attn_k_norm": "model.layers.{}.self_attn.key_layernorm",
        },
        known=("expert_shared_count", "expert_shared_feed_forward_length"),
        rope=Rope.PLAIN,
        more=_hunyuan,
    ),
}
