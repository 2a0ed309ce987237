"""Parameter counts and costs of a configuration, against published and hand-computed figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.checkpoints import saved
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.families import config_from_raw
from triptych.model.inspection.anatomy import describe_stack, dissect
from triptych.model.network.parameter_counts import part_of

BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
T5_SMALL = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
}
LLAMA_2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("raw", "published"), [(BERT_BASE, 109_482_240), (T5_SMALL, 60_506_624), (LLAMA_2_7B, 6_738_415_616)]
)
def test_parameters_are_the_published_ones(raw: dict[str, object], published: int) -> None:
    anatomy = dissect(config_from_raw(raw))
    assert anatomy.total_parameters == published
    assert anatomy.weight_bytes("bfloat16") == 2 * published


def test_kv_bytes_are_two_vectors_a_layer() -> None:
    anatomy = dissect(config_from_raw(LLAMA_2_7B))
    assert anatomy.kv_bytes_per_token("float16") == 2 * 32 * 4096 * 2
    assert anatomy.sequences_that_fit(1 << 30, 1024, "float16") == 2


def test_a_running_sequence_has_two_states() -> None:
    anatomy = dissect(read_checkpoint(saved("qwen3-next").path).config)
    state = 2 * 4 * (4 * 12 * 8 + 3 * (2 * 2 * 12 + 4 * 8))  # two recurrent layers: heads, and the convolution
    keys = 2 * 4 * 2 * 16  # one token in the attention layer
    assert anatomy.sequences_that_fit(10 * (2 * state + 100 * keys), 100, "float32") == 10


def test_flops_are_twice_the_parameters_plus_attention() -> None:
    anatomy = dissect(config_from_raw(LLAMA_2_7B))
    matrices = anatomy.parameters["decoder attention"] + anatomy.parameters["decoder MLP"] + anatomy.parameters["head"]
    assert anatomy.flops_per_token("decoder", 0) == 2 * matrices
    assert anatomy.flops_per_token("decoder", 1000) - anatomy.flops_per_token("decoder", 0) == 4 * 1000 * 4096 * 32


@pytest.mark.parametrize(
    ("kind", "of_a_key"),
    [
        ("bert", 4 * 32 * 2),
        ("deberta-v2", 8 * 32 * 2),  # two kinds of position scores
        ("deberta-p2c", 6 * 32 * 2),
        ("gemma3-both-ways", 4 * 48),  # four of five layers see at most their windows
    ],
)
def test_flops_of_attention_are_those_of_its_scores_and_its_sum(kind: str, of_a_key: int) -> None:
    anatomy = dissect(read_checkpoint(saved(kind).path).config)
    assert anatomy.flops("encoder", 101).attention - anatomy.flops("encoder", 100).attention == of_a_key


def test_a_window_without_a_causal_mask_has_two_sides() -> None:
    anatomy = dissect(read_checkpoint(saved("gemma3-both-ways").path).config)
    assert anatomy.flops("encoder", 100).attention == 4 * 48 * (100 + 4 * 5)  # windows of 3: itself, 2 on either side


def test_a_causal_prompt_token_sees_half_of_the_prompt() -> None:
    causal, both = dissect(config_from_raw(LLAMA_2_7B)), dissect(config_from_raw(BERT_BASE))
    assert causal.flops_per_prompt_token("decoder", 101) == causal.flops_per_token("decoder", 51)
    assert both.flops_per_prompt_token("encoder", 100) == both.flops_per_token("encoder", 100)


def test_shared_layers_cost_nothing_to_keep_but_as_much_to_run() -> None:
    config = config_from_raw(BERT_BASE)
    assert config.encoder is not None
    first, *others = config.encoder.layers
    sharing = tuple(replace(layer, shares_weights_with=0) for layer in others)
    shared = replace(config, encoder=replace(config.encoder, layers=(first, *sharing)))
    full, small = dissect(config), dissect(shared)
    assert small.parameters["encoder MLP"] * 12 == full.parameters["encoder MLP"]
    assert small.flops_per_token("encoder", 128) == full.flops_per_token("encoder", 128)


def test_a_new_parameter_of_a_layer_counts_as_a_norm() -> None:
    assert part_of("decoder.layers.0.attn_kept") == "decoder norms"


def test_a_stack_is_described_in_words() -> None:
    config = config_from_raw(T5_SMALL)
    assert config.decoder is not None
    words = describe_stack(config.decoder)
    assert words["attention"] == "causal + cross"
    assert words["positions"] == "t5 buckets"
    assert words["norms"] == "rms pre-norm, final norm"
