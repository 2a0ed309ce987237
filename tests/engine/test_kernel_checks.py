"""A model with a kernel that is broken on purpose starts, says so, and gives the tokens of torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.model.broken_kernels import broken
from tests.model.checkpoints import prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.selection import Selection, select_backend, select_layers
from triptych.model.attention.triton import TritonBackend
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine import kernel_checks
from triptych.model.engine.generate_builder import unrecordable
from triptych.model.errors import ConfigError
from triptych.model.kernel_check import plan as planning
from triptych.model.kernel_check.check import Check
from triptych.model.kernel_check.child import MEMORY, run_check
from triptych.model.kernel_check.memory import Memory
from triptych.model.kernel_check.plan import planned_checks
from triptych.model.kernel_check.processes import Checker, Outcome
from triptych.model.linear.base import CompiledLinear, linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.float import ExpertsLinear
from triptych.model.linear.integers import IntegerLinear
from triptych.model.llm import LLM
from triptych.model.network import fused_ops
from triptych.model.network.build import FLOAT32, build_model
from triptych.model.sampling import random_sampling
from triptych.model.system import fallbacks, kernel_faults

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
CPU, GPU, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32
SIZES = {"block_size": 8, "most_queries": 9, "most_keys": 32}


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    fallbacks.forget()
    yield
    fallbacks.forget()


# -- A model with broken kernels.


class Here(Checker):
    """Checks in this process."""

    def run(self, checks: Sequence[Check]) -> Outcome:
        outcome = Outcome()
        for check in checks:
            if reason := run_check(check, CPU):
                outcome.failed[check] = reason
            else:
                outcome.passed.append(check)
        return outcome


def check_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have models check a CPU's kernels too, in this process."""
    monkeypatch.setattr(kernel_checks, "are_checked", lambda device: True)
    monkeypatch.setattr(kernel_checks, "Checker", Here)
    monkeypatch.setattr(kernel_checks, "Memory", lambda identity: Memory(identity, tmp_path))


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], LLM]:
    """Return what the first start of a model with right kernels wrote, the sizes of its checks, and the model."""
    runs: list[int] = []
    folder, real = tmp_path_factory.mktemp("checked"), Here.run
    with pytest.MonkeyPatch.context() as patch:
        check_here(patch, folder)
        patch.setattr(Here, "run", lambda self, checks: runs.append(len(checks)) or real(self, checks))
        llm, _ = served("llama-gqa", max_model_len=12)
    return folder, runs, llm


@pytest.fixture
def checked(first_start: tuple[Path, list[int], LLM], tmp_path: Path) -> Path:
    """Return a copy of what the first start wrote."""
    return Path(shutil.copytree(first_start[0], tmp_path / "checked"))


def served(kind: str, backend: str = "triton", **settings: Any) -> tuple[LLM, list[int]]:
    """Return a model and the tokens that it generates."""
    given: dict[str, Any] = dict(device="cpu", dtype="float32", attention_backend=backend, kv_cache_memory=1 << 20)
    given |= dict(max_model_len=24, max_num_batched_tokens=16, max_num_seqs=4, block_size=8)
    llm = LLM(saved(kind).path, EngineConfig(**given | settings))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return llm, [token for _, output in llm.stream([prompt(9)], params) for token in output.token_ids]


ATTENTION = "attention is not Triton's: torch scaled_dot_product_attention: the kernels of triton failed their check"
MODELS = [  # folder, settings, kernel, how it is broken, what /info says, the backend's name
    ("llama-gqa", {}, "attend", "wrong", ATTENTION, "sdpa"),
    ("llama-gqa", {}, "prepare_heads", "raise", "queries and keys are prepared in several kernels: Runtime", "triton"),
    ("gpt2", {}, "write_pages", "nan", ATTENTION, "sdpa"),
    ("llama-gqa", {"quantization": "int8"}, "grouped_product", "wrong", "products of integers are torch's", "triton"),
    pytest.param(
        *("qwen3-next", {}, "gate_outputs", "wrong", "recurrent layers are torch's: the numbers of", "triton"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("kind", "settings", "kernel", "way", "told", "backend"), MODELS)
def test_tokens_are_right_without_a_broken_kernel(
    kind: str,
    settings: dict[str, Any],
    kernel: str,
    way: str,
    told: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as by_torch:
        by_torch.setattr(IntegerLinear, "by_kernels", IntegerLinear.reference)
        _, expected = served(kind, "triton" if settings else "sdpa", **settings)
    monkeypatch.setattr(*broken(kernel, way))
    check_here(monkeypatch, tmp_path)
    with caplog.at_level("WARNING"):
        llm, tokens = served(kind, **settings)
    assert tokens == expected
    assert llm.info.fallbacks[0].startswith(told)
    assert llm.info.attention_backend == backend
    assert f"is slower than it could be: {llm.info.fallbacks[0]}" in caplog.text


def test_a_broken_kernel_can_be_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(*broken("attend", "raise"))
    check_here(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="slow_fallbacks is refuse, and attention is not Triton's"):
        served("llama-gqa", slow_fallbacks="refuse")


def test_right_kernels_are_used_and_checked_once(
    monkeypatch: pytest.MonkeyPatch, checked: Path, first_start: tuple[Path, list[int], LLM]
) -> None:
    _, runs, first = first_start
    assert runs == [5]  # launch, attention and preparation over pages and packed rows
    check_here(monkeypatch, checked)
    monkeypatch.setattr(Here, "run", lambda self, checks: 1 / 0)
    second, _ = served("llama-gqa", max_model_len=12)
    for llm in (first, second):
        assert llm.info.fallbacks == ()
        assert llm.info.attention_backend == "triton"
    monkeypatch.setattr(*broken("double", "raise"))  # the smallest kernel, which each start launches
    with pytest.raises(ConfigError, match="the triton backend cannot be had: triton does not work here: RuntimeError"):
        served("llama-gqa", max_model_len=12)


def test_new_checks_do_not_hide_that_nothing_can_be_launched(monkeypatch: pytest.MonkeyPatch, checked: Path) -> None:
    """Check a second start with a new check, when what passed before could not be launched any more."""
    check_here(monkeypatch, checked)
    monkeypatch.setattr(*broken("double", "raise"))
    with pytest.raises(ConfigError, match="triton does not work here: RuntimeError"):
        served("llama-gqa", max_model_len=12, quantization="int8")


def test_a_full_device_does_not_count_as_a_broken_kernel(monkeypatch: pytest.MonkeyPatch, checked: Path) -> None:
    check_here(monkeypatch, checked)
    monkeypatch.setattr(kernel_checks, "run_check", lambda check, device: MEMORY)  # now only the smallest kernel
    llm, _ = served("llama-gqa", max_model_len=12)
    assert llm.info.fallbacks == ()


# -- What a model launches, and what replaces it.


def planned(kind: str, linear: LinearFactory = FLOAT32) -> list[str]:
    config = read_checkpoint(saved(kind).path).config
    backend = select_layers(Selection(TritonBackend(), ""), config, linear.dtype, linear.dtype).backend
    return [type(check).__name__ for check in planned_checks(config, backend, linear, pages=linear.dtype, **SIZES)]


def test_checks_are_of_what_a_model_launches() -> None:
    assert planned("llama-gqa") == ["LaunchCheck", *["AttentionCheck", "PreparationCheck"] * 2]
    assert planned("bert") == ["LaunchCheck", "AttentionCheck"]
    assert planned("bart") == ["LaunchCheck", *["AttentionCheck"] * 3]  # encoder, decoder, cross
    # Of texts and of images: the test model's heads differ by their masks.
    assert planned("clip").count("AttentionCheck") == 2
    assert planned("xlnet") == []
    assert planned("qwen3-next")[-1] == "RecurrenceCheck"
    on_gpu = LinearFactory(torch.bfloat16, GPU)
    found = planned("mixtral", on_gpu)
    assert found.count("ExpertsCheck") == found.count("SamplingCheck") == 2
    # Norms, two of positions, gates, sums over experts.
    assert (found.count("StepCheck"), found.count("StaticRowCheck")) == (5, 1)
    assert planned("llama-gqa", LinearFactory(torch.bfloat16, GPU, fp8=("*",))).count("ProductCheck") >= 3


@pytest.mark.parametrize(("size", "most", "cut"), [(100, 64, 100), (4096, 1024, 1024), (151_936, 32_768, 53_632)])
def test_a_checked_matrix_has_the_remainders_of_the_real_one(size: int, most: int, cut: int) -> None:
    assert planning._cut(size, most) == cut
    assert (size - cut) % most == 0


def test_torch_replaces_broken_products() -> None:
    config = read_checkpoint(saved("mixtral").path).config
    for faults, kernels in ({}, True), ({kernel_faults.EXPERTS: "x"}, False):
        linear = LinearFactory(torch.bfloat16, GPU, faults=faults)
        found = [one for one in linears(build_model(config, TritonBackend(), linear)) if isinstance(one, ExpertsLinear)]
        assert {one.kernels for one in found} == {kernels}
    config = read_checkpoint(saved("llama-gqa").path).config
    for faults, kernels in ({}, True), ({kernel_faults.FP8: "x"}, False):
        linear = LinearFactory(torch.bfloat16, GPU, fp8=("*",), faults=faults)
        compiled = linears(build_model(config, TritonBackend(), linear))
        assert {one.kernels for one in compiled if isinstance(one, CompiledLinear)} == {kernels}


def test_experts_by_torch_are_not_recorded() -> None:
    decoder = read_checkpoint(saved("mixtral").path).config.decoder
    given = (EngineConfig(), decoder, TritonBackend(), torch.bfloat16, GPU)
    assert unrecordable(*given) == ""
    assert unrecordable(*given, {kernel_faults.EXPERTS: "x"}) == "experts are torch's"


def test_recurrent_layers_by_torch_are_not_recorded() -> None:
    decoder = read_checkpoint(saved("qwen3-next").path).config.decoder
    backend = TritonBackend({kernel_faults.RECURRENCE: "x"})
    assert unrecordable(EngineConfig(), decoder, backend, F32, GPU) == "recurrent layers are torch's"


def test_sampling_by_torch_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_sampling, "has_triton", lambda device: True)
    assert random_sampling._kernel(GPU) is not None
    for _ in range(2):
        random_sampling.use_torch(RuntimeError("13 of 16 sampled tokens are not those of torch"))
    assert random_sampling._kernel(GPU) is None
    assert fallbacks.found() == ("tokens are drawn in many kernels: 13 of 16 sampled tokens are not those of torch",)


def test_what_models_share_is_torchs_in_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "broken", set())
    parts = (kernel_faults.ROW_PRODUCT, kernel_faults.STATIC_ROW, kernel_faults.step_part("add_rms"), "other")
    for _ in range(2):
        kernel_checks.use_torch(dict.fromkeys(parts, "wrong"))
    assert fused_ops.broken == {"add_rms"}
    assert fallbacks.found() == (
        "products of one row are cuBLAS's: wrong",
        "the row of a recorded step is filled in several kernels: wrong",
        "add_rms runs in several kernels, as its own does not work: wrong",
    )


def test_triton_that_cannot_launch_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select_backend(GPU, F32, "auto", {}).backend.name == "triton"
    found = select_backend(GPU, F32, "auto", {kernel_faults.TRITON: "no compiler"})
    assert isinstance(found.backend, SdpaBackend)
    assert found.reason == "torch scaled_dot_product_attention: triton does not work here: no compiler"
