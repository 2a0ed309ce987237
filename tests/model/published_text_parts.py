"""config.json of published models that also read images, and the numbers of parameters of the whole."""

from __future__ import annotations

from tests.model.published import Published, published_config

_QWEN_TOKENS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652)
_QWEN_TOKENS |= dict(vision_end_token_id=151653)

PUBLISHED_TEXT_PARTS = {
    "llava-1.5-7b-hf": Published(  # LLaMA 7B, 64 more rows of both tables, CLIP's tower, two projections
        7_063_427_072,
        published_config(
            "LlavaForConditionalGeneration",
            "llava",
            ignore_index=-100,
            image_token_index=32000,
            pad_token_id=32001,
            projector_hidden_act="gelu",
            text_config=dict(
                architectures=["LlamaForCausalLM"],
                max_position_embeddings=4096,
                model_type="llama",
                rms_norm_eps=1e-05,
                torch_dtype="float16",
                vocab_size=32064,
            ),
            tie_word_embeddings=False,
            vision_config=dict(
                hidden_size=1024,
                image_size=336,
                intermediate_size=4096,
                model_type="clip_vision_model",
                num_attention_heads=16,
                num_hidden_layers=24,
                patch_size=14,
                projection_dim=768,
                vocab_size=32000,
            ),
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
        ),
        not_ours=12_596_224 + 2_048,  # the tower's last layer and last norm, which nothing reads
    ),
    "Qwen2.5-VL-7B-Instruct": Published(  # Qwen2.5 7B, and its tower
        8_292_166_656,
        published_config(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            **_QWEN_TOKENS,
            bos_token_id=151643,
            eos_token_id=151645,
            hidden_act="silu",
            hidden_size=3584,
            intermediate_size=18944,
            max_position_embeddings=128000,
            max_window_layers=28,
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            rms_norm_eps=1e-06,
            rope_scaling=dict(mrope_section=[16, 24, 24], type="mrope"),
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vision_config=dict(depth=32, hidden_size=1280, out_hidden_size=3584),
            vision_token_id=151654,
            vocab_size=152064,
        ),
    ),
    "Qwen3-VL-30B-A3B-Instruct": Published(  # Qwen3 30B-A3B, and its tower
        31_070_754_032,
        published_config(
            "Qwen3VLMoeForConditionalGeneration",
            "qwen3_vl_moe",
            **_QWEN_TOKENS,
            text_config=dict(
                attention_bias=False,
                bos_token_id=151643,
                decoder_sparse_step=1,
                dtype="bfloat16",
                eos_token_id=151645,
                head_dim=128,
                hidden_act="silu",
                hidden_size=2048,
                intermediate_size=6144,
                max_position_embeddings=262144,
                mlp_only_layers=[],
                model_type="qwen3_vl_moe_text",
                moe_intermediate_size=768,
                norm_topk_prob=True,
                num_attention_heads=32,
                num_experts=128,
                num_experts_per_tok=8,
                num_hidden_layers=48,
                num_key_value_heads=4,
                rms_norm_eps=1e-06,
                rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
                rope_theta=5000000,
                vocab_size=151936,
            ),
            tie_word_embeddings=False,
            vision_config=dict(depth=27, hidden_size=1152, out_hidden_size=2048),
        ),
    ),
}
