"""Every served key of generation_config.json: outputs of a folder's own settings equal those of `transformers`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.generation_oracle import base, ended, folder_of, ours, theirs
from tests.matrix import rest_is_slow
from tests.model.checkpoints import saved

# Both kinds generate some of these tokens.
PROMPT = [76, 13, 65, 36, 7, 3, 21, 87, 78, 63, 50, 43, 5, 37, 65, 28, 96, 55, 71, 72, 90, 15, 27, 75]
BEAMS = {"num_beams": 3}
KEYS: dict[str, dict[str, Any]] = {
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "both n-gram sizes": {"encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.1},
    "both penalties": {"encoder_repetition_penalty": 0.3, "repetition_penalty": 1.7},
    "min_length": {"min_length": 31},
    "min_new_tokens before min_length": {"min_length": 40, "min_new_tokens": 3},
    "max_length": {"max_length": 29},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [2, 1.8]},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[7, 8], 12.0], [[9, 7, 8], -3.0]]},
    "renormalize_logits": {**BEAMS, "renormalize_logits": True, "suppress_tokens": list(range(5, 60))},
    "renormalize_logits of penalties": {**BEAMS, "renormalize_logits": True, "repetition_penalty": 3.0},
    "beams with a bias": {**BEAMS, "sequence_bias": [[[7], 2.0], [[7, 8], 3.0]], "length_penalty": 0.5},
    "beams with a decay": {**BEAMS, "exponential_decay_length_penalty": [1, 1.2], "early_stopping": True},
    "beams with the source's tokens": {**BEAMS, "encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 2.0},
}


# What differs for a decoder-only model: the encoder rules read its prompt.
OF_DECODERS = (*list(KEYS)[:4], "max_length", "renormalize_logits", "beams with the source's tokens")
EACH = rest_is_slow(product(["gpt2", "bart"], KEYS), lambda kind, key: kind == "bart" or key in OF_DECODERS)


@pytest.mark.parametrize(("kind", "key"), EACH)
def test_outputs_are_those_of_transformers(kind: str, key: str, tmp_path: Path) -> None:
    generation, reference = base(kind), saved(kind).reference
    if "min_" in key:  # so that there is an output that would end too early
        generation["eos_token_id"] = theirs(reference, generation, PROMPT)[0][0][1]
    generation |= KEYS[key]
    found = ours(folder_of(kind, tmp_path, generation), PROMPT)
    expected, scores = theirs(reference, generation, PROMPT)
    assert found.hypotheses == ended(expected, {generation["eos_token_id"]})
    if scores:
        assert found.scores == pytest.approx(scores, abs=1e-4)
    without = {name: value for name, value in generation.items() if name not in KEYS[key] or name == "num_beams"}
    plain, plain_scores = theirs(reference, without, PROMPT)
    assert (expected, scores) != (plain, plain_scores), "the setting changes nothing"


@pytest.mark.parametrize("setting", [{"min_length": 8}, {"max_length": 7}])
def test_lengths_count_what_an_output_begins_behind(setting: dict[str, int], tmp_path: Path) -> None:
    generation, begin = base("bart") | setting, (0, 5, 9, 4)
    found = ours(folder_of("bart", tmp_path, generation), PROMPT, begin)
    expected, _ = theirs(saved("bart").reference, generation, PROMPT, begin)
    assert found.hypotheses == ended(expected, {2})
