"""Engines with Triton kernels equal `transformers`; the kernels run in Triton's interpreter, so with few tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.engine import test_overlap
from tests.engine.support import add_all, request, running
from tests.engine.test_overlap import recorded
from tests.model.checkpoints import CPU, DECODERS, loaded, prompt, saved
from tests.model.parity import difference, hidden_states
from tests.model.picture_models import IMAGE, picture, with_pictures
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import Request, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.triton import TritonBackend
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.engine import network_plan
from triptych.model.engine.execution import encoder_graphs, mixed_graphs
from triptych.model.engine.execution.encoder_graphs import BatchSize, EncoderGraphs
from triptych.model.engine.execution.mixed_graphs import MixedSize
from triptych.model.engine.execution.sources import source_input
from triptych.model.llm import LLM
from triptych.model.network import fused_ops
from triptych.model.system.background_work import finish

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
KINDS = ("gemma2", "t5-relu")
# Each takes seconds in the interpreter. `test_triton.py` and others test each mechanism of the slow ones alone.
SLOW = (
    "llama-mqa-head-dim",
    "qwen3",
    "bloom",
    "qwen3-next",
    "mistral",
    "gemma3",
    "umt5",
    "gpt-oss",
    "gpt-neox",
    "cohere",
    "bart",
)
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW]


class Counting(TritonBackend):
    """A backend that counts the calls computed by kernels."""

    def __init__(self) -> None:
        self.launched = 0

    def _attend(self, *arguments: object) -> torch.Tensor:
        self.launched += 1
        return super()._attend(*arguments)  # type: ignore[arg-type]

    def recur(self, *arguments: object) -> torch.Tensor:
        self.launched += 1
        return super().recur(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*KINDS, *SLOW_KINDS])
def test_chunked_prompts_beside_decoding(kind: str) -> None:
    backend = Counting()
    run = running(kind, backend=backend, budget=8 if kind in DECODERS else 24, max_num_seqs=3)
    lengths = (3, 11, 1) if kind in DECODERS else (5, 20, 1)  # a source is read whole, a prompt in chunks
    requests = [request(kind, f"r{i}", length, i, max_tokens=2) for i, length in enumerate(lengths)]
    add_all(run, requests)
    run.run()
    assert max(run.runner.worst(kind, one, run.ids(one.request_id)) for one in requests) < 1e-4
    assert backend.launched >= 2 * 3  # layers, steps


def test_prompts_turn_by_the_rows_and_columns_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the small steps of a GPU too: a picture's positions have three coordinates."""
    monkeypatch.setattr(fused_ops, "on_gpu", lambda tensor: True)
    kind = "qwen2-5-vl-pictures"
    ids, images = with_pictures([prompt(3), picture(16, 24, 1), prompt(2)])
    params = SamplingParams(max_tokens=2, ignore_eos=True, suppress_tokens=(IMAGE,))
    one = Request("one", kind, ids, params, images=images)
    run = running(kind, backend=TritonBackend())
    run.engine.add(one)
    run.run()
    assert not fused_ops.broken
    assert run.runner.worst(kind, one, run.ids("one")) < 1e-4


@pytest.mark.parametrize("kind", ["bert", pytest.param("modernbert", marks=pytest.mark.slow), "xlnet"])
def test_encoders(kind: str) -> None:
    backend = Counting()
    ours, _ = hidden_states(loaded(kind, backend))
    theirs, _ = hidden_states(loaded(kind))
    assert difference(torch.cat(ours), torch.cat(theirs)) < 1e-4
    assert backend.launched == {"bert": 2, "modernbert": 5, "xlnet": 0}[kind]


@pytest.mark.parametrize("kind", ["bert", pytest.param("t5-encoder", marks=pytest.mark.slow)])
def test_texts_of_a_recorded_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that kernels leave padding out: rows after the texts, and texts that are not there."""
    monkeypatch.setattr(encoder_graphs, "batch_sizes", lambda *_: [BatchSize(16, 3)])
    model, sources = loaded(kind, TritonBackend()), [token_source(prompt(length, length)) for length in (7, 2)]
    graphs = EncoderGraphs(model, max_num_seqs=3, max_num_tokens=16, record=recorded)
    finish(graphs.record_each())
    with torch.inference_mode():
        expected = model.encode(source_input(sources, CPU))
        assert difference(graphs.run(BatchSize(16, 3), sources), expected) < 1e-5


@pytest.mark.slow
def test_prompts_of_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_overlap, "LengthsBackend", TritonBackend)
    monkeypatch.setattr(mixed_graphs, "mixed_sizes", lambda *_: [MixedSize(0, 16), MixedSize(2, 16)])
    requests = [request("llama-gqa", f"r{i}", length, i, max_tokens=4) for i, length in enumerate((9, 5, 11, 3))]
    plain, _ = test_overlap.outputs_of("llama-gqa", requests)
    found, _ = test_overlap.outputs_of("llama-gqa", requests, prompts=True)
    assert test_overlap.tokens_of(found) == test_overlap.tokens_of(plain)


@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8"))]
)
def test_a_setting_chooses_it_and_the_tokens_are_torchs(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_plan, "check_kv_dtype", lambda *_: None)  # torch reads fp8 pages on a CPU, slowly

    def generated(backend: str) -> list[tuple[int, float]]:
        settings = EngineConfig(
            device="cpu",
            dtype="float32",
            attention_backend=backend,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory=1 << 20,
            block_size=8,
        )
        llm = LLM(saved("llama-gqa").path, settings)
        assert llm.info.attention_backend == backend
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
        outputs = [output for _, output in llm.stream([prompt(11), prompt(3)], params)]
        return sorted((entry.token_id, entry.logprob) for output in outputs for entry in output.logprobs or [])

    ours, theirs = generated("triton"), generated("sdpa")
    assert len(ours) == 8
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-4)
