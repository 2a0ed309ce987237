"""config.json of published decoders with experts, and their numbers of parameters as the model cards have them."""

from __future__ import annotations

from tests.model.published_decoders import published_config as _config

PUBLISHED_EXPERTS: dict[str, tuple[int, str]] = {
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        _config(
            "MixtralForCausalLM",
            "mixtral",
            bos_token_id=1,
            eos_token_id=2,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_experts_per_tok=2,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=8,
            output_router_logits=False,
            rms_norm_eps=1e-05,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
            vocab_size=32000,
        ),
    ),
}
