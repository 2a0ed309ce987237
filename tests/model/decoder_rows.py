"""Rows of `tests.model.checkpoints` for dense decoders: odd shapes, windows that prompts cross, each mechanism once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

VOCAB = 97
Rows = dict[str, Callable[[], Any]]


def random_model(architecture: str, settings: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    """Return a maker of a random model of `transformers`' class `architecture`."""

    def make() -> Any:
        import transformers

        model_class = getattr(transformers, architecture)
        # A copy: configurations write defaults into the position settings, which rows share.
        model = model_class(model_class.config_class(**deepcopy({**settings, **changes})))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        return model

    return make


SIZES = dict(vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48)
_IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(**SIZES, **_IDS, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False)
_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))
_FOUR = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5)
_MULTIPLIERS = dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.5, **_ROPE
)
_OLMO3_ROPES = dict(
    full_attention=dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16),
    sliding_attention=dict(rope_type="default", rope_theta=500.0),
)
_LONGROPE: dict[str, Any] = dict(
    original_max_position_embeddings=16,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=500.0,
        original_max_position_embeddings=16,
        short_factor=[1.0, 1.1, 1.3, 1.7],
        long_factor=[1.0, 2.0, 5.0, 8.0],
    ),
)
# Experts with similar and different scores, temperatures on both sides of the original context.
_PHIMOE: dict[str, Any] = dict(num_local_experts=5, router_jitter_noise=0.3, attention_bias=True, lm_head_bias=True)
_PHIMOE |= dict(rope_parameters=dict(**_LONGROPE["rope_parameters"], short_mscale=1.2, long_mscale=1.4))
_GPTJ = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, rotary_dim=4, **_IDS)
_BIGCODE = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, **_IDS)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)
# Windows shorter than prompts, gates that reach their bound, YaRN.
_GPT_OSS: dict[str, Any] = dict(num_local_experts=5, num_experts_per_tok=3, head_dim=12, sliding_window=5)
_GPT_OSS |= dict(intermediate_size=20, swiglu_limit=0.7, attn_implementation="eager", num_hidden_layers=3)
_GPT_OSS |= dict(
    rope_parameters=dict(
        **dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, truncate=False),
        **dict(beta_fast=32.0, beta_slow=1.0),
    )
)
_FALCON = dict(**{**SIZES, "num_attention_heads": 6, "hidden_size": 48}, **_IDS, **_ROPE)
del _FALCON["intermediate_size"]
BLOOM = dict(vocab_size=VOCAB, hidden_size=36, n_layer=2, n_head=6, **_IDS)
_OPT: dict[str, Any] = dict(vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4, hidden_size=32, ffn_dim=48)
_OPT |= dict(max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=1)

_MINISTRAL3 = dict(
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=500.0,
        factor=4.0,
        original_max_position_embeddings=8,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.3,
    )
)
_VISION = dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8)


def with_images(name: str, text: dict[str, Any], vision: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return a maker of a model that also reads images, whose language model is compared."""

    def make() -> Any:
        import transformers

        seen = dict(hidden_size=16, **_VISION) if vision is None else deepcopy(vision)
        config = getattr(transformers, f"{name}Config")(text_config=deepcopy(text), vision_config=seen, **settings)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


CLIP: dict[str, Any] = dict(model_type="clip_vision_model", hidden_size=16, projection_dim=16, **_VISION)
# An image patch has three positions, which rotate different dimensions; in a text the three are equal.
QWEN2_VL = {**LLAMA, "rope_parameters": dict(rope_type="default", rope_theta=500.0, mrope_section=[1, 1, 2])}
QWEN_VISION = dict(depth=1, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=16)
QWEN3_VL: dict[str, Any] = dict(
    **LLAMA,
    head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=500.0, mrope_section=[2, 2, 2], mrope_interleaved=True),
)
_QWEN3_VL_MOE = {**QWEN3_VL, **dict(num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)}

# Sides of different widths, windows shorter than sources.
_GEMMA2: dict[str, Any] = {
    **LLAMA,
    **dict(head_dim=12, query_pre_attn_scalar=20, sliding_window=5, attn_logit_softcapping=2.0),
    **dict(final_logit_softcapping=3.0, tie_word_embeddings=True),
}
T5GEMMA: dict[str, Any] = dict(
    encoder={**_GEMMA2, "hidden_size": 24, "num_hidden_layers": 3},
    decoder=_GEMMA2,
    vocab_size=VOCAB,
    attn_implementation="eager",
    decoder_start_token_id=0,
)

# Two value heads for each key head, of different widths.
RECURRENT: dict[str, Any] = dict(
    **{**LLAMA, "num_hidden_layers": 3},
    head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=8,
    rms_norm_eps=1e-2,  # outputs may be small: a larger epsilon keeps the norm from amplifying rounding errors
)

_SHARED_EXPERT = dict(**EXPERTS, shared_expert_intermediate_size=24)

# Layers that share keys, values that equal keys, two kinds of heads, and settings that have no effect.
_GEMMA4: dict[str, Any] = {**LLAMA, "tie_word_embeddings": True, "attn_implementation": "eager"} | dict(
    **dict(num_hidden_layers=6, head_dim=12, global_head_dim=20, sliding_window=5, final_logit_softcapping=3.0),
    rms_norm_eps=3e-2,  # keeps the norm from amplifying rounding errors
    **dict(hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3),
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
_GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=20)
_GEMMA4_EXPERTS |= dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_hidden_layers=4)
_GEMMA4_EXPERTS |= dict(attention_k_eq_v=True, num_global_key_value_heads=1)
_GEMMA4_EXPERTS |= dict(layer_types=["sliding_attention", "full_attention"] * 2)
# The 12B, whose files have no settings of per-layer embeddings and experts.
_GEMMA4_UNIFIED = {name: value for name, value in _GEMMA4.items() if "per_layer_input" not in name}
_GEMMA4_UNIFIED |= dict(num_kv_shared_layers=0, num_hidden_layers=3, layer_types=_GEMMA4["layer_types"][:3])
_GEMMA4_UNIFIED |= dict(attention_k_eq_v=True, num_global_key_value_heads=1)


def _gemma4(architecture: str, settings: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    """Return a maker of a Gemma 4 with random values in its buffers, which would all be 1."""

    def make() -> Any:
        model = random_model(architecture, settings, **changes)()
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5)
        return model

    return make


def _chosen_by_scores(architecture: str, **changes: Any) -> Callable[[], Any]:
    """Return a maker of a model with random biases of the router's choice: they are buffers and would all be 0."""

    def make() -> Any:
        model = random_model(architecture, LLAMA, num_hidden_layers=3, moe_intermediate_size=20, **changes)()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
        return model

    return make


_GROUPS: dict[str, Any] = dict(n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2, norm_topk_prob=True)
_GROUPS |= dict(first_k_dense_replace=1, n_shared_experts=2, routed_scaling_factor=1.5)

DENSE_DECODERS: Rows = {
    "ministral": random_model("MinistralForCausalLM", LLAMA, **_FOUR, head_dim=12, **_ROPE),
    "ministral3": random_model("Ministral3ForCausalLM", LLAMA, head_dim=12, **_MINISTRAL3),
    "mistral3": with_images(
        "Mistral3",
        dict(model_type="ministral3", **LLAMA, head_dim=12, **_MINISTRAL3),
        dict(hidden_size=16, head_dim=8, **_VISION),
    ),
    "gemma3-with-images": with_images(
        "Gemma3", dict(model_type="gemma3_text", **LLAMA, head_dim=12, sliding_window=5), mm_tokens_per_image=4
    ),
    "qwen2-5-vl": with_images("Qwen2_5_VL", QWEN2_VL, QWEN_VISION),
    "qwen3-vl-moe": with_images("Qwen3VLMoe", _QWEN3_VL_MOE, dict(**QWEN_VISION, deepstack_visual_indexes=[0])),
    "smolvlm": with_images("SmolVLM", dict(model_type="llama", **LLAMA)),
    "llava": with_images("Llava", dict(model_type="mistral", **LLAMA, sliding_window=5), CLIP),
    "gemma4": _gemma4("Gemma4ForCausalLM", _GEMMA4, use_double_wide_mlp=True),
    "gemma4-experts": _gemma4("Gemma4ForCausalLM", {**_GEMMA4, **_GEMMA4_EXPERTS}),
    "gemma4-unified": _gemma4("Gemma4UnifiedForCausalLM", _GEMMA4_UNIFIED),
    "phi3-longrope": random_model("Phi3ForCausalLM", LLAMA, **_LONGROPE),
    "granite": random_model("GraniteForCausalLM", LLAMA, **_MULTIPLIERS),
    "granite-biases": random_model("GraniteForCausalLM", LLAMA, attention_bias=True, mlp_bias=True),
    "seed-oss": random_model("SeedOssForCausalLM", LLAMA, head_dim=12, attention_out_bias=True, mlp_bias=True),
    "arcee": random_model("ArceeForCausalLM", LLAMA, mlp_bias=True),
    "nemotron": random_model("NemotronForCausalLM", LLAMA, partial_rotary_factor=0.5),
    "hunyuan": random_model(
        "HunYuanDenseV1ForCausalLM",
        LLAMA,
        head_dim=12,
        rope_parameters=dict(rope_type="dynamic", alpha=50.0, factor=1.0, rope_theta=500.0),
    ),
    "hunyuan-moe": random_model(
        "HunYuanMoEV1ForCausalLM", {**LLAMA, "intermediate_size": 20}, num_experts=5, moe_topk=[2, 2], head_dim=12
    ),
    "apertus": random_model("ApertusForCausalLM", LLAMA, head_dim=12),
    "glm": random_model("GlmForCausalLM", LLAMA, head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "glm4": random_model("Glm4ForCausalLM", LLAMA, head_dim=12, partial_rotary_factor=0.5, attention_bias=True),
    "ernie4-5": random_model("Ernie4_5ForCausalLM", LLAMA, head_dim=12, use_bias=True),
    "helium": random_model("HeliumForCausalLM", LLAMA, head_dim=8, attention_bias=True, mlp_bias=True),
    "olmo": random_model("OlmoForCausalLM", LLAMA),
    "olmo-clipped": random_model("OlmoForCausalLM", LLAMA, clip_qkv=0.5),
    "gpt-neo": random_model(
        "GPTNeoForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=32, num_heads=4, max_position_embeddings=128, **_IDS),
        **dict(num_layers=3, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=5),
    ),
    "gpt-bigcode": random_model("GPTBigCodeForCausalLM", _BIGCODE),
    "gpt-bigcode-heads": random_model("GPTBigCodeForCausalLM", _BIGCODE, multi_query=False),
    "smollm3": random_model(
        "SmolLM3ForCausalLM",
        LLAMA,
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=5,
    ),
    "olmo2": random_model("Olmo2ForCausalLM", LLAMA, **_ROPE),
    "olmo3": random_model("Olmo3ForCausalLM", LLAMA, **_FOUR, rope_parameters=_OLMO3_ROPES),
    "exaone4": random_model("Exaone4ForCausalLM", LLAMA, **_FOUR, **_ROPE),
    "cohere": random_model("CohereForCausalLM", LLAMA, use_qk_norm=True, tie_word_embeddings=True, **_ROPE),
    "cohere2": random_model("Cohere2ForCausalLM", LLAMA, **_FOUR, logit_scale=0.5, **_ROPE),
    "stablelm": random_model("StableLmForCausalLM", LLAMA, use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm-parallel": random_model(
        "StableLmForCausalLM", LLAMA, qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "starcoder2": random_model("Starcoder2ForCausalLM", LLAMA, sliding_window=7, **_ROPE),
    "phi": random_model("PhiForCausalLM", LLAMA, qk_layernorm=True, num_key_value_heads=4),
    "gptj": random_model("GPTJForCausalLM", _GPTJ),
    "codegen": random_model("CodeGenForCausalLM", _GPTJ, n_head=8, n_embd=48),
    "falcon": random_model("FalconForCausalLM", _FALCON),
    "falcon-groups": random_model("FalconForCausalLM", _FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-slopes": random_model(
        "FalconForCausalLM",
        _FALCON,
        **dict(num_attention_heads=8, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "bloom": random_model("BloomForCausalLM", BLOOM),
    "mpt": random_model("MptForCausalLM", dict(vocab_size=VOCAB, d_model=36, n_layers=2, n_heads=6, **_IDS)),
    "bloom-normed-residual": random_model("BloomForCausalLM", BLOOM, apply_residual_connection_post_layernorm=True),
    "xglm": random_model(
        "XGLMForCausalLM",
        dict(vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, **_IDS | dict(pad_token_id=1)),
    ),
    "opt": random_model("OPTForCausalLM", _OPT),
    "qwen2-moe": random_model(
        "Qwen2MoeForCausalLM",
        LLAMA,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        **EXPERTS,
        shared_expert_intermediate_size=28,
    ),
    "qwen3-moe": random_model(
        "Qwen3MoeForCausalLM", LLAMA, num_hidden_layers=3, decoder_sparse_step=2, norm_topk_prob=True, **EXPERTS
    ),
    "olmoe": random_model("OlmoeForCausalLM", LLAMA, num_experts=7, num_experts_per_tok=3),
    "olmoe-clipped": random_model("OlmoeForCausalLM", LLAMA, num_experts=7, num_experts_per_tok=3, clip_qkv=0.5),
    "granitemoe": random_model("GraniteMoeForCausalLM", LLAMA, num_local_experts=3, **_MULTIPLIERS),
    "glm4-moe": _chosen_by_scores("Glm4MoeForCausalLM", **_GROUPS, head_dim=16, use_qk_norm=True, attention_bias=True),
    "dots1": _chosen_by_scores(
        "Dots1ForCausalLM",
        **_GROUPS,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=5,
    ),
    "ernie4-5-moe": _chosen_by_scores("Ernie4_5_MoeForCausalLM", moe_num_experts=5, moe_k=2, use_bias=True),
    "minimax-m2": _chosen_by_scores("MiniMaxM2ForCausalLM", num_local_experts=5, num_experts_per_tok=2, head_dim=12),
    "granitemoeshared": random_model(
        "GraniteMoeSharedForCausalLM", LLAMA, num_local_experts=3, shared_intermediate_size=20, **_MULTIPLIERS
    ),
    "phimoe": random_model("PhimoeForCausalLM", LLAMA, **_PHIMOE),
    "gpt-oss": random_model("GptOssForCausalLM", LLAMA, **_GPT_OSS),
    "mixtral": random_model("MixtralForCausalLM", LLAMA, num_local_experts=5, intermediate_size=20),
    "opt-post-norm": random_model("OPTForCausalLM", _OPT, do_layer_norm_before=False, enable_bias=False),
    "opt-narrow": random_model("OPTForCausalLM", _OPT, do_layer_norm_before=False, word_embed_proj_dim=20),
    "qwen3-next": random_model("Qwen3NextForCausalLM", RECURRENT, **_SHARED_EXPERT, mlp_only_layers=[1], **_ROPE),
    "qwen3-5": random_model("Qwen3_5ForCausalLM", RECURRENT, linear_conv_kernel_dim=3, **_ROPE),
    "qwen3-5-moe": random_model("Qwen3_5MoeForCausalLM", RECURRENT, **_SHARED_EXPERT, **_ROPE),
}
