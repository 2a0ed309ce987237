"""Outliers planted into checkpoints change nothing in floats, and much in integers that share a scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.bench.outliers import plant
from tests.model.checkpoints import native_backends
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.llm import LLM
from triptych.model.pretrained import embedded_models

pytestmark = pytest.mark.usefixtures("packed_here")

TEXTS = ["def area(width, height):\n    return width * height\n", "twenty five percent of it"]


def scores(model: str, llm: LLM) -> list[float]:
    if model == "embed":
        return list(llm.encode(TEXTS).flatten())
    params = SamplingParams(max_tokens=8, logprobs=0)
    return [entry.logprob for _, output in llm.stream(TEXTS, params) for entry in output.logprobs or ()]


@pytest.mark.parametrize("model", ["code", "normalize", "embed"])
def test_planted_outliers_leave_the_function_as_it_was(model: str, tmp_path: Path) -> None:
    folder = Path(embedded_models()[model])
    planted = plant(folder, tmp_path / model, 256)
    exact = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=8 << 20)
    before = scores(model, LLM(folder, exact))
    assert before and scores(model, LLM(planted, exact)) == before
    if not native_backends() or model != "code":
        return
    rounded = replace(exact, quantization="int8")
    with_them, without = (np.array(scores(model, LLM(one, rounded))) for one in (planted, folder))
    assert np.abs(with_them - before).max() > 3 * np.abs(without - before).max()
