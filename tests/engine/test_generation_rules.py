"""The rules of generation_config.json: greedy outputs equal those of `generate` in `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix import rest_is_slow
from tests.model.checkpoints import START, copied, prompt, reference_logits, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import FinishReason, TokenOutput, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.llm import LLM

PROMPT = prompt(9)
NEW = 12
_THEIRS: dict[tuple[str, str], list[int]] = {}
OTHER = 50  # a token that is never generated without a rule


def ours(kind: str, folder: Path, rules: dict[str, Any], **params: Any) -> list[TokenOutput]:
    """Return the outputs of a copy of the kind's folder whose generation_config.json has these rules added."""
    path = copied(kind, folder)
    own = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(own | rules))
    return [
        output
        for _, output in LLM(path, EngineConfig(dtype="float32")).stream(
            [PROMPT], SamplingParams(**{"max_tokens": NEW, **params})
        )
    ]


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def theirs(kind: str, rules: dict[str, Any]) -> list[int]:
    """Return what `generate` returns after the prompt or the decoder start token."""
    key = (kind, repr(rules))
    if key not in _THEIRS:
        _THEIRS[key] = _generated(kind, rules)
    return _THEIRS[key]


def _generated(kind: str, rules: dict[str, Any]) -> list[int]:
    reference = saved(kind).reference
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "eos_token_id": None, **rules}
    with torch.inference_mode():
        found = reference.generate(torch.tensor([PROMPT]), **settings)[0].tolist()
    return found[1 if reference.config.is_encoder_decoder else len(PROMPT) :]


KINDS = rest_is_slow(
    ("llama-gqa", "gpt2", "bart", "marian", "t5-relu"), lambda kind: kind in ("llama-gqa", "bart", "t5-relu")
)
SEQ2SEQ = ("bart", "marian", "t5-relu")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(kind: str, folder: Path, rules: dict[str, Any], **params: Any) -> list[TokenOutput]:
    """Check that our outputs equal `transformers`' and differ from those without the rules."""
    outputs = ours(kind, folder, rules, **params)
    as_rules = {"min_tokens": "min_new_tokens", "no_repeat_ngram_size": "no_repeat_ngram_size"}
    asked = {name: params[ours] for ours, name in as_rules.items() if ours in params}
    assert ids(outputs) == theirs(kind, {**rules, **asked})
    assert ids(outputs) != theirs(kind, {})
    return outputs


def test_without_rules(kind: str, tmp_path: Path) -> None:
    outputs = ours(kind, tmp_path, {}, ignore_eos=True)
    assert ids(outputs) == theirs(kind, {})


def test_suppressed_tokens(kind: str, tmp_path: Path) -> None:
    plain = theirs(kind, {})
    check(kind, tmp_path, {"suppress_tokens": [plain[0]]}, ignore_eos=True)


@pytest.mark.parametrize("forced", [None, OTHER])
def test_tokens_suppressed_at_the_beginning(kind: str, forced: int | None, tmp_path: Path) -> None:
    rules = {"forced_bos_token_id": forced} if forced and kind in SEQ2SEQ else {}
    first = theirs(kind, rules)[len(rules)]
    check(kind, tmp_path, {**rules, "begin_suppress_tokens": [first]}, ignore_eos=True)


def test_bad_words_of_one_and_several_tokens(kind: str, tmp_path: Path) -> None:
    plain = theirs(kind, {})
    check(kind, tmp_path, {"bad_words_ids": [[plain[0]], [OTHER, 3]]}, ignore_eos=True)
    for length in (2, 3):
        check(kind, tmp_path / str(length), {"bad_words_ids": [plain[:length], plain[-length:]]}, ignore_eos=True)


def test_bad_word_that_is_an_eos_id_is_ignored(kind: str, tmp_path: Path) -> None:
    end = theirs(kind, {})[1]
    check(kind, tmp_path, {"bad_words_ids": [[end]], "eos_token_id": [end]})


@pytest.mark.parametrize("size", [1, 3])
def test_no_ngram_is_repeated(kind: str, size: int, tmp_path: Path) -> None:
    params = {"no_repeat_ngram_size": size, "ignore_eos": True}
    outputs = ids(ours(kind, tmp_path, {}, **params))
    assert outputs == theirs(kind, {"no_repeat_ngram_size": size})
    text = outputs if kind in SEQ2SEQ else [*PROMPT, *outputs]
    grams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
    assert len(set(grams[-len(outputs) :])) == len(grams[-len(outputs) :])


def test_several_ids_end_a_sequence(kind: str, tmp_path: Path) -> None:
    plain = theirs(kind, {})
    outputs = check(kind, tmp_path, {"eos_token_id": [OTHER, plain[2]]})
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == plain[2]


def test_no_eos_before_min_tokens(kind: str, tmp_path: Path) -> None:
    end = theirs(kind, {})[0]
    check(kind, tmp_path, {"eos_token_id": [end]}, min_tokens=4)


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_a_forced_first_token(kind: str, tmp_path: Path) -> None:
    assert ids(check(kind, tmp_path, {"forced_bos_token_id": OTHER}, ignore_eos=True))[0] == OTHER


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_an_only_token_is_the_forced_end(kind: str, tmp_path: Path) -> None:
    rules = {"forced_bos_token_id": OTHER, "forced_eos_token_id": 2}
    outputs = ours(kind, tmp_path, rules, max_tokens=1)
    assert ids(outputs) == theirs(kind, {**rules, "max_new_tokens": 1}) == [2]


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_decoder_start_tokens(kind: str, tmp_path: Path) -> None:
    outputs = ours(kind, tmp_path, {"decoder_start_token_id": OTHER}, ignore_eos=True, logprobs=0)
    for start, close in ((OTHER, True), (START, False)):
        expected = reference_logits(kind, [start, *ids(outputs)], token_source(PROMPT)).log_softmax(-1)
        found = [(at, one.logprob) for at, output in enumerate(outputs) for one in output.logprobs or []]
        worst = max(abs(expected[at, ids(outputs)[at]].item() - logprob) for at, logprob in found)
        assert (worst < 1e-4) == close


def test_forced_eos_counts_as_length(kind: str, tmp_path: Path) -> None:
    outputs = check(kind, tmp_path, {"forced_eos_token_id": OTHER, "eos_token_id": [OTHER]})
    assert ids(outputs)[-1] == OTHER
    assert [output.finish_reason for output in outputs[-2:]] == [None, FinishReason.LENGTH]
    assert outputs[-1].stop_reason == OTHER  # so that its text is left out


def test_own_eos_before_the_forced_one_is_a_stop(kind: str, tmp_path: Path) -> None:
    end = theirs(kind, {})[0]
    outputs = check(kind, tmp_path, {"forced_eos_token_id": end, "eos_token_id": [end]})
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_length_settings_are_defaults(tmp_path: Path) -> None:
    path = copied("bart", tmp_path)
    rules = {"max_length": 9, "min_length": 4, "no_repeat_ngram_size": 3}
    (path / "generation_config.json").write_text(json.dumps(rules))
    assert read_checkpoint(path).sampling_defaults == rules  # lengths include the prefix, as they do in a request
