"""The table of the GGUF architectures (`general.architecture`) that are served; Llama's relatives have their rows here.

One `Architecture` for each: its metadata keys become config.json's, its tensors' names the published ones, so that the
families' tables do the rest. The rows of other kinds are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triptych.model.checkpoint.gguf import family_settings
from triptych.model.checkpoint.gguf.encoders import ENCODERS
from triptych.model.checkpoint.gguf.gemma4 import GEMMA4
from triptych.model.checkpoint.gguf.more_experts import MORE_EXPERTS
from triptych.model.checkpoint.gguf.older_decoders import FALCON_GROUPS, OLDER_DECODERS
from triptych.model.checkpoint.gguf.recurrent import RECURRENT
from triptych.model.checkpoint.gguf.table import (
    ATTENTION,
    CHOSEN_EXPERTS,
    GATED,
    LLAMA_KEYS,
    LLAMA_NAMES,
    OUTSIDE,
    PRE_NORMS,
    SANDWICH_NORMS,
    Architecture,
    Rope,
    layers,
    with_experts,
)
from triptych.model.gguf.container import GGUFModel

# Keys that change nothing, or that every architecture's settings are read of.
HARMLESS_KEYS = (
    *("vocab_size", "tensor_data_layout", "attention.value_length", "rope.scaling.finetuned"),
    *(
        "attention.causal",
        "pooling_type",
        "nextn_predict_layers",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scale_linear",
        "rope.scaling.yarn_ext_factor",
    ),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"),
)

_GEMMA_NAMES = {**OUTSIDE, **layers("model.layers.{}", {**ATTENTION, **GATED, **SANDWICH_NORMS})}
_PHI3_NAMES = {
    **OUTSIDE,
    **layers(
        "model.layers.{}",
        {
            **PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
_LLAMA = Architecture(
    "llama", LLAMA_KEYS, LLAMA_NAMES, rope=Rope.PLAIN, paired=("attn_q", "attn_k"), more=family_settings.llama
)
_QWEN2 = Architecture("qwen2", LLAMA_KEYS, LLAMA_NAMES, rope=Rope.PLAIN)
_QWEN3 = Architecture("qwen3", LLAMA_KEYS, LLAMA_NAMES, rope=Rope.PLAIN)
_SECTIONS = ("rope.dimension_sections", "n_deepstack_layers")
_GEMMA = Architecture("gemma", LLAMA_KEYS, LLAMA_NAMES, rope=Rope.PLAIN, norms_plus_one=True)
_GEMMA2 = Architecture(
    "gemma2",
    {
        **LLAMA_KEYS,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    _GEMMA_NAMES,
    rope=Rope.PLAIN,
    norms_plus_one=True,
    more=family_settings.gemma,
)
_GEMMA3_KEYS = {
    **LLAMA_KEYS,
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
    more=family_settings.gemma,
)
_SEED_OSS_NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
}
_GLM4_NAMES = {
    **_PHI3_NAMES,
    **layers("model.layers.{}", ATTENTION),
    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
}
del _GLM4_NAMES["blk.{}.attn_qkv"]  # which is read as three where it is there
_GLM_NAMES = {name: theirs for name, theirs in _GLM4_NAMES.items() if not name.startswith("blk.{}.post_")}
_APERTUS_NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_norm": "model.layers.{}.attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.feedforward_layernorm",
}
_XIELU = "model.layers.{}.mlp.act_fn."
_HUNYUAN_NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.query_layernorm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.key_layernorm",
}
_WINDOWS = ("rope.freq_base_swa", "attention.sliding_window", "attention.sliding_window_pattern")
_LAYER_NORM_KEYS = {key: name for key, name in LLAMA_KEYS.items() if name != "rms_norm_eps"}
_COHERE_KEYS = {
    **_LAYER_NORM_KEYS,
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "logit_scale": "logit_scale",
}
_OUTPUT_NORMS = {name: theirs for name, theirs in SANDWICH_NORMS.items() if name.startswith("post_")}
_OUTPUT_NORM_NAMES = {**OUTSIDE, **layers("model.layers.{}", {**ATTENTION, **GATED, **_OUTPUT_NORMS})}
_OLMO2 = Architecture(
    "olmo2", LLAMA_KEYS, _OUTPUT_NORM_NAMES, known=_WINDOWS, rope=Rope.PLAIN, more=family_settings.windows
)
_STARCODER2_NAMES = {
    **OUTSIDE,
    **layers("model.layers.{}", {**ATTENTION, **PRE_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
_PHI_NAMES = {
    **OUTSIDE,
    "output_norm": "model.final_layernorm",
    **layers(
        "model.layers.{}",
        {
            **ATTENTION,
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
}
_LLAMA_EXPERTS = {**LLAMA_KEYS, **CHOSEN_EXPERTS, "expert_count": "num_local_experts"}
_QWEN_EXPERTS = {
    **{**LLAMA_KEYS, **CHOSEN_EXPERTS, "expert_count": "num_experts"},
    "expert_feed_forward_length": "moe_intermediate_size",
}
_QWEN3_EXPERTS = Architecture(
    "qwen3_moe",
    _QWEN_EXPERTS,
    with_experts("mlp", "gate"),
    constants={"norm_topk_prob": True},
    rope=Rope.PLAIN,
)
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_MIXTRAL = Architecture(
    "mixtral",
    _LLAMA_EXPERTS,
    with_experts("block_sparse_moe", "gate", ("w1", "w3", "w2")),
    rope=Rope.PLAIN,
    paired=("attn_q", "attn_k"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "phi3": Architecture(
        "phi3",
        {**LLAMA_KEYS, "attention.sliding_window": "sliding_window"},
        _PHI3_NAMES,
        rope=Rope.PLAIN,
        more=family_settings.phi3,
    ),
    "granite": Architecture(
        "granite",
        {**LLAMA_KEYS, **_GRANITE_SCALES},
        LLAMA_NAMES,
        rope=Rope.PLAIN,
        paired=("attn_q", "attn_k"),
        more=family_settings.llama,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {**_LLAMA_EXPERTS, **_GRANITE_SCALES, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        {
            **with_experts("block_sparse_moe", "router.layer"),
            "blk.{}.ffn_gate_shexp": "model.layers.{}.shared_mlp.input_linear",
            "blk.{}.ffn_down_shexp": "model.layers.{}.shared_mlp.output_linear",
        },
        rope=Rope.PLAIN,
        paired=("attn_q", "attn_k"),
        followed={"ffn_gate_shexp": "ffn_up_shexp"},
        more=lambda model, raw: {"model_type": "granitemoeshared"} if raw.get("shared_intermediate_size") else {},
    ),
    # Whether scores are divided by the sum of the chosen ones stands in llama.cpp's code.
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        with_experts("mlp", "gate"),
        constants={"norm_topk_prob": False},
        rope=Rope.PLAIN,
    ),
    "qwen3moe": _QWEN3_EXPERTS,
    "olmoe": Architecture(
        "olmoe",
        {**LLAMA_KEYS, **CHOSEN_EXPERTS, "expert_count": "num_experts"},
        with_experts("mlp", "gate"),
        constants={"norm_topk_prob": False},
        rope=Rope.PLAIN,
    ),
    "mistral3": replace(
        _LLAMA,
        model_type="mistral",
        known=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        more=family_settings.mistral3,
    ),
    # The language models of folders that read images too: positions of a text are the same in every section.
    "qwen2vl": replace(_QWEN2, known=_SECTIONS),
    "qwen3vl": replace(_QWEN3, known=_SECTIONS),
    "qwen3vlmoe": replace(_QWEN3_EXPERTS, known=_SECTIONS),
    "eurobert": replace(_QWEN2, model_type="eurobert", known=("classifier.pooling_type",), encoder=True),
    "seed_oss": replace(_QWEN2, model_type="seed_oss", names=_SEED_OSS_NAMES, more=family_settings.biases),
    "arcee": replace(_LLAMA, model_type="arcee", more=family_settings.biases),
    "ernie4_5": replace(_QWEN2, model_type="ernie4_5", more=family_settings.ernie),
    "glm4": replace(_QWEN2, model_type="glm4", names=_GLM4_NAMES, more=family_settings.biases),
    "chatglm": replace(_QWEN2, model_type="glm", names=_GLM_NAMES, more=family_settings.biases),
    "hunyuan-dense": replace(_QWEN2, model_type="hunyuan_v1_dense", names=_HUNYUAN_NAMES),
    "apertus": Architecture(
        "apertus",
        LLAMA_KEYS,
        _APERTUS_NAMES,
        {"hidden_act": "xielu"},
        rope=Rope.PLAIN,
        arrays={
            "xielu.alpha_p": (f"{_XIELU}alpha_p", (1,)),
            "xielu.alpha_n": (f"{_XIELU}alpha_n", (1,)),
            "xielu.beta": (f"{_XIELU}beta", ()),
            "xielu.eps": (f"{_XIELU}eps", ()),
        },
    ),
    # Its norms have no tensors.
    "olmo": Architecture(
        "olmo",
        {**_LAYER_NORM_KEYS, "attention.clamp_kqv": "clip_qkv"},
        LLAMA_NAMES,
        known=("attention.layer_norm_epsilon",),
        rope=Rope.PLAIN,
        paired=("attn_q", "attn_k"),
    ),
    "nemotron": Architecture(
        "nemotron",
        {**_LAYER_NORM_KEYS, "attention.layer_norm_epsilon": "norm_eps"},
        LLAMA_NAMES,
        known=("attention.layer_norm_rms_epsilon",),
        rope=Rope.PLAIN,
        norms_plus_one=True,
        more=family_settings.biases,
    ),
    "smollm3": replace(_LLAMA, model_type="smollm3"),
    "olmo2": _OLMO2,
    "exaone4": replace(_OLMO2, model_type="exaone4"),
    "command-r": Architecture("cohere", _COHERE_KEYS, LLAMA_NAMES, rope=Rope.PLAIN, more=family_settings.cohere),
    "cohere2": Architecture(
        "cohere2", {**_COHERE_KEYS, "attention.sliding_window": "sliding_window"}, LLAMA_NAMES, rope=Rope.PLAIN
    ),
    "stablelm": Architecture(
        "stablelm",
        {
            **_LAYER_NORM_KEYS,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        LLAMA_NAMES,
        rope=Rope.PLAIN,
        more=family_settings.stablelm,
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
    "gemma-embedding": replace(_GEMMA3, constants={"use_bidirectional_attention": True}, encoder=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **{**_LLAMA_EXPERTS, "attention.sliding_window": "sliding_window"},
            "expert_feed_forward_length": "intermediate_size",
        },
        {
            **with_experts("mlp", "router"),
            "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
            "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
        },
        rope=Rope.PLAIN,
        more=family_settings.gpt_oss,
    ),
    **OLDER_DECODERS,
    **MORE_EXPERTS,
    **GEMMA4,
    **RECURRENT,
    **ENCODERS,
}
# Networks that have the name of another one: by what tells them.
VARIANTS: dict[str, tuple[Callable[[GGUFModel], bool], Architecture]] = {
    "llama": (lambda model: bool(model.get("llama.expert_count")), _MIXTRAL),
    "falcon": (lambda model: "blk.0.attn_norm_2.weight" in model.tensors, FALCON_GROUPS),
}
# Tensors that metadata of the other kind repeat: rotary factors, which become settings.
DROPPED_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
