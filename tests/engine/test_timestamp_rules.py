"""Whisper's decoding rules equal those of `transformers`: suppression, timestamps, log-probability sums, probes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from tests.engine.support import running
from tests.engine.test_overlap import outputs_of, tokens_of
from tests.model.checkpoints import AUDIO, START, prompt, reference_input, reference_logits, saved, source_of
from tests.model.decoder_rows import VOCAB
from triptych.model.api.request import Request, TokenOutput, token_source
from triptych.model.api.sampling_params import Probe, SamplingParams
from triptych.model.api.timestamp_rules import TimestampRules
from triptych.model.sampling.sampler import SamplingRow, process_logits

EOS, NO_TIMESTAMPS, BEGIN = 60, 63, 64  # of 97 tokens
SUPPRESSED, SUPPRESSED_FIRST = (3, 61, 62), (7, EOS)
RULES = TimestampRules(BEGIN, NO_TIMESTAMPS, EOS, 20)
SPEECH: dict[str, Any] = {
    "timestamps": RULES,
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": SUPPRESSED_FIRST,
    "cumulative_logprob": True,
}
PLAIN = {name: type(value)() if name != "timestamps" else None for name, value in SPEECH.items()}


def processors(begin_index: int, rules: TimestampRules = RULES) -> LogitsProcessorList:
    """Return the processors of `WhisperForConditionalGeneration.generate`, in its order."""
    config = GenerationConfig(eos_token_id=rules.eos_id)
    config.no_timestamps_token_id = rules.no_timestamps_id
    config.max_initial_timestamp_index = rules.max_initial_timestamp_index
    return LogitsProcessorList(
        [
            SuppressTokensAtBeginLogitsProcessor(SUPPRESSED_FIRST, begin_index),
            SuppressTokensLogitsProcessor(SUPPRESSED),
            WhisperTimeStampLogitsProcessor(config, begin_index),
        ]
    )


def row_of(tokens: list[int], begin: int, rules: TimestampRules) -> SamplingRow:
    banned = [*SUPPRESSED, *(SUPPRESSED_FIRST if len(tokens) == begin else ())]
    return SamplingRow(SamplingParams(timestamps=rules), 0, tokens, begin, banned)


@pytest.mark.parametrize("most", [None, 0, 20])
def test_masks_are_those_of_the_processors(most: int | None) -> None:
    rules, choice = replace(RULES, max_initial_timestamp_index=most), random.Random(most)
    generator = torch.Generator().manual_seed(0)
    histories = []
    for number in range(150):
        ids = (choice.randrange(VOCAB), choice.randrange(BEGIN, VOCAB))
        output = [choice.choice((choice.randrange(VOCAB), *ids)) for _ in range(number % 9)]
        histories.append(([START, *prompt(number % 3, number)], output))
    logits = 3 * torch.randn(len(histories), VOCAB, generator=generator)
    logits[::2, BEGIN:] -= 4  # so that text is sometimes likelier
    rows = [row_of([*begin, *output], len(begin), rules) for begin, output in histories]
    others = [SamplingRow(SamplingParams(temperature=1.0), 0, [1, 2], 1), SamplingRow(SamplingParams(), 0, [1], 1, [4])]
    found = process_logits(torch.cat([logits, logits[:2]]), [*rows, *others])
    timed = 0
    for (begin, output), scores, ours in zip(histories, logits, found, strict=False):
        theirs = processors(len(begin), rules)(torch.tensor([[*begin, *output]]), scores[None])[0]
        assert torch.equal(ours, theirs)
        timed += bool(ours[:BEGIN].isneginf().all())
    assert len(histories) / 5 < timed < len(histories) * 4 / 5
    assert torch.equal(found[-2], logits[0]) and found[-1].isneginf().nonzero().tolist() == [[4]]
    alone = torch.cat([process_logits(one[None], [row]) for one, row in zip(logits, rows, strict=True)])
    assert torch.equal(found[:-2], alone)


def test_only_allowed_tokens_come() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    allowed = SamplingParams(allowed_token_ids=(5, 9, 11))
    bans = ((), (9,), (5, 9, 11, 12), ())
    rows = [SamplingRow(one, 0, [1], 1, ban) for one, ban in zip([allowed] * 3 + [SamplingParams()], bans, strict=True)]
    found = process_logits(logits, rows)
    left = [(~scores.isneginf()).nonzero()[:, 0].tolist() for scores in found]
    assert left[:3] == [[5, 9, 11], [5, 11], [5, 9, 11]]  # bans are dropped where no other token is left
    assert torch.equal(found[0, [5, 9, 11]], logits[0, [5, 9, 11]])
    assert torch.equal(found[3], logits[3])


def asked(kind: str, name: str, length: int, **params: Any) -> Request:
    """Return a request whose decoder prompt has `length % 3` tokens after the start token."""
    sampling = SamplingParams(**{"max_tokens": 14, **SPEECH, **params})
    ids = prompt(5 + length, length)
    if kind == "llama":
        return Request(name, kind, ids, sampling)
    source = source_of(AUDIO["whisper"], length) if kind == "whisper" else token_source(ids)
    return Request(name, kind, (START, *prompt(length % 3, length)), sampling, source)


def crowd(kind: str, requests: list[Request], **engine: Any) -> list[TokenOutput]:
    """Return the outputs of these requests and others, run together in chunks with too few blocks for all."""
    run = running(kind, num_blocks=26, budget=16, **engine)
    run.engine.eos_token_ids = (EOS,)
    for number, one in enumerate(requests):
        run.engine.add(one)
        run.engine.add(asked(kind, f"plain{number}", 3 + number, **PLAIN))
        other: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.3, "logprobs": 2}
        run.engine.add(asked(kind, f"other{number}", 4 + number, seed=number, **PLAIN, **other))
    run.run()
    assert run.engine.scheduler.num_preemptions or len(requests) == 1
    return run.outputs


def results(outputs: list[TokenOutput], name: str) -> list[tuple[list[int], float | None]]:
    """Return the ids and the log-probability sum of each sequence of a request."""
    mine = [output for output in outputs if output.request_id == name]
    found = []
    for index in sorted({output.index for output in mine}):
        parts = [output for output in mine if output.index == index]
        found.append(([token for part in parts for token in part.token_ids], parts[-1].cumulative_logprob))
    return found


@torch.inference_mode()
def theirs(kind: str, request: Request, num_beams: int) -> list[tuple[list[int], float]]:
    """Return `generate`'s sequences with the sums that Whisper's `_retrieve_avg_logprobs` averages."""
    begin = len(request.prompt_token_ids)
    inputs = {"input_ids": torch.tensor([request.prompt_token_ids])}
    if request.source is not None:
        inputs = {**reference_input(request.source), "decoder_input_ids": inputs["input_ids"]}
    found = GenerationMixin.generate(  # Whisper's own handles whole recordings
        saved(kind).reference,
        **inputs,
        max_new_tokens=14,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=processors(begin),
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for place, sequence in enumerate(found.sequences[:, begin:].tolist()):
        ids = sequence[: sequence.index(EOS) + 1] if EOS in sequence else sequence
        beams = found.beam_indices[place].tolist() if num_beams > 1 else [place] * len(ids)
        rows = [found.scores[at][beams[at]].log_softmax(-1) for at in range(len(ids))]
        sequences.append((ids, sum(row[token].item() for row, token in zip(rows, ids, strict=True))))
    return sequences


@pytest.mark.parametrize(
    ("kind", "num_beams"), [("bart", 1), ("bart", 3), ("llama", 1), ("llama", 3), ("whisper", 1), ("whisper", 5)]
)
def test_outputs_and_sums_are_those_of_generate(kind: str, num_beams: int) -> None:
    requests = [asked(kind, f"r{n}", 2 * n, num_beams=num_beams, n=num_beams) for n in range(3)]
    outputs = crowd(kind, requests)
    for request in requests:
        found, expected = results(outputs, request.request_id), theirs(kind, request, num_beams)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        assert [total for _, total in found] == pytest.approx([total for _, total in expected], abs=2e-4)
        assert all(ids[0] >= BEGIN for ids, _ in found)
    assert all(total is None for _, total in results(outputs, "plain0"))


def test_samples_with_a_seed_keep_the_rules() -> None:
    requests = [asked("t5-relu", f"r{n}", 2 * n, temperature=1.2, seed=n, n=2) for n in range(3)]
    outputs = crowd("t5-relu", requests)
    alone = running("t5-relu")
    alone.engine.eos_token_ids = (EOS,)
    for request in requests:
        alone.engine.add(request)
    alone.run()
    drawn = set()
    for request in requests:
        found = results(outputs, request.request_id)
        assert [ids for ids, _ in found] == [ids for ids, _ in results(alone.outputs, request.request_id)]
        for ids, total in found:
            drawn |= set(ids)
            assert total == pytest.approx(sum_of(request, ids), abs=1e-4)
    assert len(drawn) > 20


def sum_of(request: Request, ids: list[int]) -> float:
    """Return the sum of an output's log-probabilities, from `transformers`' model and processors."""
    tokens, begin, total = [*request.prompt_token_ids], len(request.prompt_token_ids), 0.0
    logits = reference_logits("t5-relu", [*tokens, *ids], request.source)
    for token in ids:
        left: Tensor = processors(begin)(torch.tensor([tokens]), logits[len(tokens) - 1][None])
        total += left.log_softmax(-1)[0, token].item()
        tokens.append(token)
    return total


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_probe_asks_the_prefill(num_beams: int) -> None:
    ids = (BEGIN, 5, EOS)
    requests = [
        asked("bart", f"r{n}", 2, num_beams=num_beams, n=num_beams, probe=Probe(n % 3, ids), max_tokens=3)
        for n in range(4)
    ]
    requests = [replace(one, prompt_token_ids=(START, *prompt(11, 1))) for one in requests]
    outputs = crowd("bart", requests)
    for request in requests:
        probe = request.params.probe
        assert probe is not None
        expected = reference_logits("bart", list(request.prompt_token_ids), request.source)[probe.position]
        firsts = [
            next(o for o in outputs if (o.request_id, o.index) == (request.request_id, i)) for i in range(num_beams)
        ]
        for first in firsts:
            assert first.probe_logprobs == pytest.approx(expected.log_softmax(-1)[list(ids)].tolist(), abs=1e-4)
    assert [o for o in outputs if o.probe_logprobs is not None and o.request_id.startswith("plain")] == []


def test_the_language_is_detected_in_one_step() -> None:
    languages = (20, 30, 40, 41)
    params = {**PLAIN, "allowed_token_ids": languages, "probe": Probe(0, languages), "max_tokens": 1}
    request = replace(asked("t5-relu", "r", 3, **params), prompt_token_ids=(START,))
    [output] = [output for output in crowd("t5-relu", [request]) if output.request_id == "r"]
    logits = reference_logits("t5-relu", [START], request.source)[0, list(languages)]
    assert output.token_ids == [languages[int(logits.argmax())]]
    assert output.probe_logprobs is not None
    assert torch.tensor(output.probe_logprobs).softmax(-1).tolist() == pytest.approx(
        logits.softmax(-1).tolist(), abs=1e-4
    )


def test_nothing_changes_where_steps_are_launched_ahead() -> None:
    def requests() -> list[Request]:
        speech = [asked("bart", f"r{n}", 2 * n, temperature=n % 2 * 1.0, seed=n) for n in range(4)]
        static = {**PLAIN, "suppress_tokens": SUPPRESSED, "begin_suppress_tokens": SUPPRESSED_FIRST}
        banned = [asked("bart", f"banned{n}", n, **static) for n in range(3)]
        allowed = [asked("bart", f"allowed{n}", n, **PLAIN, allowed_token_ids=(8, 9)) for n in range(3)]
        return [*speech, *banned, *allowed]

    launched, runner = outputs_of("bart", requests(), overlap=True, graphs=True)
    sequential, _ = outputs_of("bart", requests())
    assert tokens_of(launched) == tokens_of(sequential)
    for key, outputs in launched.items():
        assert outputs[-1].cumulative_logprob == pytest.approx(sequential[key][-1].cumulative_logprob, abs=1e-4)
    assert runner.followed
