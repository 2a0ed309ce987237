"""Folders with rare settings in config.json: logits equal those of `transformers` for the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.config_variants import compare, raw_of
from triptych.model.errors import ConfigError
from triptych.model.families import read_settings

NESTED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "beta_slow": 2.0, "truncate": False}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon", {"parallel_attn": None}),
        ("falcon", {"multi_query": None, "bias": None, "alibi": None, "new_decoder_architecture": None}),
        ("gpt-neox", {"use_parallel_residual": False}),
        ("gpt-neox", {"hidden_act": "gelu_10", "is_decoder": True}),
        ("bert", {"hidden_act": "quick_gelu"}),
        ("gpt-neox", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 900.0}),
        ("gptj", {"tie_word_embeddings": True}),
        ("phi", {"tie_word_embeddings": True}),
        ("marian", {"decoder_vocab_size": 11}),
        ("bloom", {"n_embed": 48}),
        ("falcon", {"n_embed": 96}),
        ("mpt", {"expansion_ratio": 8, "no_bias": False, "logit_scale": 0.5}),
        ("llama-gqa", {"hidden_act": "mish", "pretraining_tp": 2, "is_llama_config": True, "sliding_window": 3}),
        ("qwen2", {**WINDOW, "layer_types": None, "max_window_layers": 1}),
        ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen2-moe", {**WINDOW, "layer_types": None, "max_window_layers": 2}),
        ("qwen3-moe", WINDOW),
        ("llama-gqa", {"rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 32.0, "attn_factor": 0.5}}),
        ("llama-gqa", {"rope_parameters": {**YARN, "factor": None, "mscale": 0.7, "mscale_all_dim": 0.5}}),
        ("llama-gqa", {"rope_parameters": YARN, "original_max_position_embeddings": 64}),
        ("llama-gqa", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 9.0}}),
        ("llama-gqa", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3, "finetuned": True}}),
        ("llama-gqa", {"partial_rotary_factor": 0.5}),
        ("ministral3", {"rope_parameters": {**YARN, "rope_type": "default", "llama_4_scaling_beta": 0.5}}),
        ("albert", {"embedding_size": 32}),
        ("rembert", {"input_embedding_size": 32}),
        ("phimoe", {"original_max_position_embeddings": 32}),
        ("stablelm", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": NESTED}}),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 77.0}}),
        ("olmo3", {"rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 8}}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
        ("apertus", {"rope_parameters": {"rope_type": "default"}}),
        ("gemma", {"hidden_activation": "relu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"hidden_activation": "gelu", "hidden_act": "relu"}),
        ("gemma3", {"rope_parameters": {"full_attention": YARN}, "original_max_position_embeddings": 64}),
        ("cohere2", {"layer_types": None, "_sliding_window_pattern": 2}),
        ("qwen3-5-moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("stablelm", {"rope_parameters": PLAIN, "rope_pct": 1.0}),
        ("mistral", {"attention_bias": True}),
        ("mixtral", {"attention_bias": True}),
        ("qwen2", {"attention_bias": True}),
        ("hunyuan", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("apertus", {"rope_parameters": {}}),
        ("gpt-oss", {"rope_parameters": {}}),
        ("gemma4-unified", {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97}),
        ("gemma4-unified", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}),
        ("granitemoe", {"shared_intermediate_size": 20}),
    ],
)
def test_what_a_file_says_is_computed_as_by_the_library(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    found = compare(kind, changes, tmp_path)
    assert found.kind == "equal", found.reason


@pytest.mark.parametrize(
    ("kind", "changes", "missing"),
    [
        ("phi3-longrope", {}, "original_max_position_embeddings"),
        ("gemma2", {"hidden_act": "relu"}, "hidden_activation"),
    ],
)
def test_what_a_file_does_not_say_is_as_its_class_has_it(
    kind: str, changes: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    found = compare(kind, changes, tmp_path, drop=(missing,))
    assert found.kind == "equal", found.reason


@pytest.mark.parametrize("kind", ["qwen3-vl-pictures", "qwen3-vl-moe"])
def test_qwen3_vl_has_no_windows(kind: str, tmp_path: Path) -> None:
    text = raw_of(kind)["text_config"] | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    found = compare(kind, {"text_config": text}, tmp_path)
    assert (found.kind, found.without_effect) == ("equal", True), found.reason


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("data2vec-text", {"conv_bias": True, "num_channels": 1, "tdnn_dim": 7, "output_hidden_size": 5}),
        ("esm", {"max_recycles": 9, "pairwise_dim": 4, "structure_module": True}),
        ("esm", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("olmoe", {"sliding_window": 2}),
        ("qwen3-5", {"in_channels": 1, "patch_size": 2, "temporal_patch_size": 5}),
        ("t5gemma", {"head_dim": 3, "hidden_size": 5, "hidden_activation": "relu", "rms_norm_eps": 0.5}),
        ("whisper", {"scale_embedding": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("xglm", {"add_cross_attention": True}),
        ("xlnet", {"clamp_len": 0, "same_length": True}),
        ("vit", {"pooler_output_size": None}),
    ],
)
def test_what_the_network_does_not_read_is_ignored(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    found = compare(kind, changes, tmp_path)
    assert (found.kind, found.without_effect) == ("equal", True), found.reason


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt-neox", {"rotary_emb_base": "x"}, "rotary_emb_base must be a number, found 'x'"),
        ("gpt-neox", {"rotary_pct": "x"}, "rotary_pct must be a number, found 'x'"),
        ("gemma3", {"rope_local_base_freq": True}, "rope_local_base_freq must be a number, found True"),
        ("modernbert", {"local_rope_theta": "x"}, "local_rope_theta must be a number, found 'x'"),
        ("olmo3", {"rope_parameters": {"type": "yarn", "factor": 2.0}}, "for each type of its layers .*, found factor"),
        ("xlnet", {"clamp_len": 3}, "clamp_len = 3 is not served"),
    ],
)
def test_a_refusal_names_the_key_of_the_file(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({**raw_of(kind), **changes})
