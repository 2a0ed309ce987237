"""Recorded decode steps with a draft model: each starts from the states that drafts left, and the reverse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from tests.engine.support import request
from tests.engine.test_draft_model import built
from tests.engine.test_overlap import LengthsBackend, recorded
from tests.engine.test_speculation import generated
from tests.model.checkpoints import saved
from triptych.model.api.request import Request
from triptych.model.attention.selection import Selection
from triptych.model.engine import generate_builder
from triptych.model.engine.execution.step_program import StepPlan, StepProgram
from triptych.model.engine.planning import kernels
from triptych.model.engine.speculation.model_drafts import DraftOdds

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4}


def test_recurrent_layers_go_on_from_the_states_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check accepted and rejected drafts, and steps without drafts for which slots of draft states were allocated."""
    chosen, steps, run = Selection(LengthsBackend(), "asked for", preferred="sdpa"), Counter[str](), StepProgram.run

    def noted(program: StepProgram, plan: StepPlan, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        how = "replayed" if plan.replayed else "replayed with prompts" if plan.mixed is not None else "launched"
        if program is drafted.generate.runner.draft_model._program:  # type: ignore[union-attr]
            steps[f"draft model, {how}"] += 1
        elif program.graphs is not None:
            steps["replayed" if plan.replayed else "launched"] += 1
            writing = drafted.generate.scheduler.running  # type: ignore[union-attr]
            steps["not said"] += plan.replayed and any(len(one.state_writes) > 1 for one in writing)
        return run(program, plan, tokens)

    monkeypatch.setattr(DraftOdds, "measured", lambda self, **times: None)
    monkeypatch.setattr(kernels, "select_backend", lambda *_: chosen)
    monkeypatch.setattr(generate_builder, "CudaRecorder", lambda *_, **__: recorded)
    monkeypatch.setattr(generate_builder, "can_record", lambda engine, model, device: engine.cuda_graphs)
    plain = built("qwen3-5", cuda_graphs=False, **SETTINGS)
    drafted = built("qwen3-5", saved("llama-gqa").path, **SETTINGS)
    assert plain.generate is not None and drafted.generate is not None
    drafted.generate.overlap = True  # as on a GPU
    monkeypatch.setattr(StepProgram, "run", noted)
    asked = [asking(number) for number in range(8)]
    expected = generated(plain, asked)
    found = {key: one for at in range(0, 8, 2) for key, one in generated(drafted, asked[at : at + 2]).items()}
    assert said(found) == said(expected)
    assert scores(found) == pytest.approx(scores(expected), abs=1e-3)
    stats = drafted.generate.stats()
    assert stats.model_draft_tokens > stats.model_accepted_tokens > 0
    assert steps["launched"] > 30 and steps["replayed"] > 10 and steps["not said"] > 2, steps
    assert steps["draft model, replayed"] > 10 and steps["draft model, replayed with prompts"] > 10, steps
    assert not steps["draft model, launched"]


def asking(number: int) -> Request:
    """Return a request limited to 20 tokens, up to 5 of them stop ids, so that some drafts are right by chance."""
    allowed, (num_ends, temperature) = tuple(range(3, 23)), ((3, 1.0), (5, 0.6), (0, 0.6))[number % 3]
    drawn = {"temperature": temperature, "seed": number, "allowed_token_ids": allowed, "logprobs": 0}
    ends = allowed[20 - num_ends :]
    return request("qwen3-5", f"r{number}", 4 + 9 * number, number, max_tokens=40, stop_token_ids=ends, **drawn)


def said(found: dict[Any, Any]) -> dict[Any, list[object]]:
    """Return the tokens of each sequence and why it ended."""
    return {key: [one for one, _ in ones] for key, ones in found.items()}


def scores(found: dict[Any, Any]) -> list[float]:
    return [scored.logprob for key in sorted(found) for _, scored in found[key][:-1]]
