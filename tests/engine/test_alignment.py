"""Alignments of prompts with their sources equal those of `transformers` and of OpenAI's `find_alignment`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from tests.engine.support import request, running
from tests.model.checkpoints import AUDIO, START, prompt, reference_input, saved
from triptych.model.api.request import Alignment, AlignmentMethod, FinishReason, Request
from triptych.model.attention.native import NativeBackend
from triptych.model.engine.execution.model_runner import Launched
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.native.library import Library, native
from triptych.model.network import alignment as rules

HEADS = ((0, 1), (1, 0), (1, 3))
POSITIONS = AUDIO["whisper"].num_positions


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("length", [3, 4, 40])
def test_the_median_filter_is_that_of_transformers(width: int, length: int) -> None:
    rows = torch.randn(5, length, generator=torch.Generator().manual_seed(width))
    assert torch.equal(rules.median_filter(rows, width), _median_filter(rows[None, None], width)[0, 0])


def theirs_through(gains: Tensor) -> list[int]:
    """Return where each row begins, computed by `_extract_token_timestamps`."""
    rows, columns = _dynamic_time_warping(-gains.double().numpy())
    jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    found: list[int] = columns[jumps].tolist()
    return found


@pytest.mark.parametrize("way", ["numpy", "native"])
def test_the_way_through_a_matrix_is_that_of_transformers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native()
    if way == "native" and not isinstance(library, Library):
        pytest.skip(library)
    monkeypatch.setattr(rules, "loaded", lambda: library if way == "native" else None)
    generator = torch.Generator().manual_seed(4)
    for number, (rows, columns) in enumerate([(1, 1), (1, 9), (9, 1), (5, 5), (3, 40), (20, 7), (17, 90)]):
        gains = torch.randn(rows, columns, generator=generator)
        if number % 2:
            gains = gains.round()  # makes equal sums likely
        assert rules.warp(gains) == theirs_through(gains)


def aligned(name: str, length: int, seed: int, positions: int, method: AlignmentMethod, **changes: Any) -> Request:
    """Return a request that aligns a prompt from its third or fourth token to its last token or the one before."""
    made = request("whisper", name, 0, seed, max_tokens=1)
    first = 2 + seed % 2
    alignment = Alignment(HEADS, first, length - (seed % 3 == 0), positions, method)
    return replace(made, prompt_token_ids=(START, *prompt(length - 1, seed)), alignment=alignment, **changes)


@torch.inference_mode()
def weights_of(request: Request) -> tuple[Tensor, ...]:
    """Return the weights `[1, H, T, F]` of each layer's cross attention."""
    model = saved("whisper").reference
    assert request.source is not None
    model.config._attn_implementation = "eager"
    ids = torch.tensor([request.prompt_token_ids])
    found = model(**reference_input(request.source), decoder_input_ids=ids, output_attentions=True).cross_attentions
    return tuple(found)


def by_transformers(request: Request) -> list[int]:
    alignment = request.alignment
    assert alignment is not None
    rows = tuple(layer[:, :, : alignment.end] for layer in weights_of(request))
    outputs = GenerateEncoderDecoderOutput(sequences=torch.zeros(1, alignment.end + 1), cross_attentions=(rows,))
    times = saved("whisper").reference._extract_token_timestamps(
        outputs, alignment.heads, num_frames=2 * alignment.num_positions, num_input_ids=alignment.first
    )
    return [round(time / 0.02) for time in times[0, alignment.first : alignment.end].tolist()]


def by_openai(request: Request) -> list[int]:
    """Compute the alignment as `find_alignment` does: softmax, crop, normalise over tokens, filter, average, warp."""
    alignment, layers = request.alignment, weights_of(request)
    assert alignment is not None
    weights = torch.stack([layers[layer][0, head] for layer, head in alignment.heads])[..., : alignment.num_positions]
    weights = weights / weights.sum(dim=-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    matrix = _median_filter(((weights - mean) / std)[None], 7)[0].mean(dim=0)
    return theirs_through(matrix[alignment.first : alignment.end])


@pytest.mark.parametrize("method", list(AlignmentMethod))
@pytest.mark.parametrize("way", ["native", "torch"])
def test_alignments_are_the_references_beside_other_requests(way: str, method: AlignmentMethod) -> None:
    library = native()
    if way == "native" and not isinstance(library, Library):
        pytest.skip(library)
    backend = NativeBackend(library) if way == "native" and isinstance(library, Library) else None
    run = running("whisper", backend=backend, num_blocks=24, budget=12, max_num_seqs=8)
    decoder = run.runner.model.decoder
    assert decoder is not None and (decoder.runner is not None) == (way == "native")
    asked = [aligned(f"r{n}", 9 + 3 * n, n, POSITIONS - n % 4, method) for n in range(5)]
    for number, one in enumerate(asked):
        run.engine.add(request("whisper", f"other{number}", 0, number, temperature=number % 2 * 1.0))
        run.engine.add(one)
    run.run()
    reference = by_openai if method is AlignmentMethod.OPENAI else by_transformers
    for one in asked:
        [output] = [output for output in run.outputs if output.request_id == one.request_id]
        assert output.finish_reason is FinishReason.LENGTH
        assert output.alignment == reference(one)
    assert all(o.alignment is None for o in run.outputs if o.request_id.startswith("other"))
    assert len({tuple(o.alignment) for o in run.outputs if o.alignment}) == len(asked)


def test_a_preempted_prompt_is_aligned_anew() -> None:
    run = running("whisper", budget=20)
    one = aligned("r", 30, 1, POSITIONS, AlignmentMethod.TRANSFORMERS)
    run.engine.add(one)
    run.step()
    assert run.engine.scheduler.running[0].cross_queries
    run.engine.scheduler.preempt(run.engine.scheduler.running[0])
    run.run()
    assert run.outputs[-1].alignment == by_transformers(one)


def test_rows_of_a_step_that_failed_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = running("whisper", budget=12)
    sample = run.runner._sample

    def sampled_alone(steps: list[ScheduledSequence], *others: Any) -> Launched:
        if len(steps) > 1:
            raise RuntimeError("a fault of two sequences together")
        return sample(steps, *others)

    monkeypatch.setattr(run.runner, "_sample", sampled_alone)
    one = aligned("r", 30, 1, POSITIONS, AlignmentMethod.TRANSFORMERS)
    run.engine.add(request("whisper", "other", 0, 2))
    run.engine.add(one)
    run.run()
    assert [o.alignment for o in run.outputs if o.request_id == "r"] == [by_transformers(one)]


def test_it_ends_as_any_request_does() -> None:
    run = running("whisper", budget=20)
    late, dropped = (aligned(name, 30, 1, POSITIONS, AlignmentMethod.OPENAI) for name in ("late", "dropped"))
    run.engine.add(replace(late, deadline=0.0))
    run.engine.add(dropped)
    run.step(1)
    run.outputs += run.engine.abort("dropped", None, FinishReason.CANCELLED)
    run.run()
    ends = {output.request_id: output.finish_reason for output in run.outputs}
    assert ends == {"late": FinishReason.DEADLINE, "dropped": FinishReason.CANCELLED}
