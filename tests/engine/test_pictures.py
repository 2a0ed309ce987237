"""Pictures in prompts: logits equal those of `transformers`, however a prompt is cut, shared or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.support import Running, running
from tests.model.checkpoints import native_backends, prompt
from tests.model.picture_models import IMAGE, picture, with_pictures
from triptych.model.api.request import Request, Source
from triptych.model.api.sampling_params import SamplingParams

KIND = "qwen3-5-pictures"
FIRST, SECOND, THIRD = picture(16, 40, 1), picture(8, 8, 2), picture(40, 24, 3)


def asking(name: str, parts: Sequence[Sequence[int] | Source], **params: Any) -> Request:
    """Return a request about texts and pictures."""
    ids, images = with_pictures(parts)
    return Request(
        name,
        KIND,
        ids,
        SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "suppress_tokens": (IMAGE,), **params}),
        images=images,
    )


def questions() -> list[Request]:
    return [
        asking("one", [prompt(5), FIRST, prompt(7)]),
        asking("first", [THIRD, prompt(3)]),
        asking("several", [prompt(3), FIRST, prompt(1), SECOND, prompt(4), THIRD, prompt(2)]),
        asking("text", [prompt(21)]),
        asking("equal", [prompt(2), FIRST, prompt(9)]),
    ]


def worst(run: Running, requests: Sequence[Request]) -> float:
    return max(run.runner.worst(KIND, one, run.ids(one.request_id)) for one in requests)


@pytest.mark.parametrize("budget", [256, 7, 1])
def test_logits_equal_transformers_wherever_prompts_are_cut(budget: int) -> None:
    run = running(KIND, budget=budget)
    for one in questions():
        run.engine.add(one)
    assert worst(run.run(), questions()) < 1e-4


def test_logits_of_c_equal_transformers() -> None:
    for backend in native_backends():
        run = running(KIND, backend=backend, budget=11)
        for one in questions():
            run.engine.add(one)
        assert worst(run.run(), questions()) < 1e-4
