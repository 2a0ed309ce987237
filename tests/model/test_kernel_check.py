"""Checks of kernels: right ones pass, broken ones fail and cost only themselves, and what passed is remembered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

import triptych.model.kernel_check
from tests.model.broken_kernels import broken
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    GatedDeltaConfig,
    NormConfig,
    NormKind,
    RotaryConfig,
)
from triptych.model.config.layer import Activation
from triptych.model.kernel_check.attention_checks import AttentionCheck, PreparationCheck, RecurrenceCheck
from triptych.model.kernel_check.check import Check, LaunchCheck
from triptych.model.kernel_check.child import run_check
from triptych.model.kernel_check.codec import decode, encode
from triptych.model.kernel_check.memory import Memory, identity_of, source_files
from triptych.model.kernel_check.processes import Checker, Outcome
from triptych.model.kernel_check.product_checks import ExpertsCheck, ProductCheck, SamplingCheck
from triptych.model.kernel_check.product_problems import ExpertsShape, Fp8Shape, IntegerShape
from triptych.model.kernel_check.step_checks import RowProductCheck, StaticRowCheck, StepCheck
from triptych.model.kernel_check.step_problems import step_problems
from triptych.model.network.fused_ops import STEPS

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
CPU, F32 = torch.device("cpu"), torch.float32
MODEL = Path(triptych.model.kernel_check.__file__).parents[1]
ROTARY = AttentionConfig(4, 2, 16, 0.25, position=RotaryConfig(16), qk_norm=NormConfig(NormKind.RMS, 1e-6))
SIZES = {"block_size": 8, "most_queries": 9, "most_keys": 32}


def attention(layer: AttentionConfig, pages: torch.dtype | None = F32, *, causal: bool = True, **sizes: int) -> Check:
    return AttentionCheck(layer, F32, pages, causal, cross=False, **SIZES | sizes)


CHECKS: dict[str, Check] = {
    "launch": LaunchCheck(),
    "pages": attention(ROTARY),
    "split": attention(AttentionConfig(2, 1, 16, 0.25), most_keys=600, most_queries=1),
    "packed": attention(AttentionConfig(2, 2, 16, 0.25, position=BucketBiasConfig()), None, causal=False),
    "int8 pages": attention(AttentionConfig(4, 2, 16, 0.25, window=20, softcap=5.0), torch.int8),
    "fp8 pages": attention(AttentionConfig(4, 2, 16, 0.25, sinks=True), torch.float8_e4m3fn),
    "slopes": attention(AttentionConfig(4, 2, 16, 0.25, position=AlibiConfig.of_heads(4))),
    "cross": AttentionCheck(AttentionConfig(2, 2, 16, 0.25), F32, F32, causal=False, cross=True, **SIZES),
    "preparation": PreparationCheck(ROTARY, F32, F32, 8),
    "int8 preparation": PreparationCheck(ROTARY, F32, torch.int8, 8),
    "fp8 preparation": PreparationCheck(ROTARY, F32, torch.float8_e4m3fn, 8),
    "packed preparation": PreparationCheck(ROTARY, F32, None, 8),
    "recurrence": RecurrenceCheck(GatedDeltaConfig(2, 4, 12, 8, 4, 1e-6), F32),
    "int8": ProductCheck(IntegerShape(64, 96, 8, 0), F32),
    "int4": ProductCheck(IntegerShape(32, 264, 4, 32, zeros=True, bias=True), F32),
    "fp8": ProductCheck(Fp8Shape(96, 64, bias=True), F32),
    "fp8 blocks": ProductCheck(Fp8Shape(64, 96, (32, 32)), F32),
    "experts": ExpertsCheck(ExpertsShape(3, 40, 70, bias=True), F32),
    "sampling": SamplingCheck(300, F32),
    "one row": RowProductCheck(37, 69, bias=True, dtype=F32),
    "recorded row": StaticRowCheck(2, has_sources=True),
    "recorded row without sources": StaticRowCheck(1, has_sources=False),
    "norms": StepCheck("norm_add_norm", 40, F32),
    "gates": StepCheck("gated", 40, F32, Activation.SILU),
    "turns": StepCheck("turns", 40, F32),
}
BREAKS = [  # the kernel, the check that finds it, how it is broken, what the reason says
    ("attend", "pages", "raise", "RuntimeError: ptxas fatal: not for this card"),
    ("attend", "pages", "wrong", "are off by"),
    ("attend", "packed", "nan", "are not numbers"),
    ("combine", "split", "wrong", "are off by"),
    ("write_pages", "pages", "wrong", "are off by"),
    ("prepare_heads", "preparation", "wrong", "prepared queries are off by"),
    ("prepare_heads", "packed preparation", "nan", "are not numbers"),
    ("step_states", "recurrence", "wrong", "are off by"),
    ("gate_outputs", "recurrence", "nan", "are not numbers"),
    ("grouped_product", "int8", "wrong", "are off by"),
    ("dequantize", "int4", "nan", "are not numbers"),
    ("scaled_product", "fp8", "raise", "ptxas fatal"),
    ("experts_product", "experts", "wrong", "are off by"),
    ("one_row", "one row", "wrong", "are off by"),
    ("fill_kernel", "recorded row", "wrong", "the row of a recorded step is wrong"),
    ("sum_and_norm", "norms", "nan", "are not numbers"),
    ("gate_rows", "gates", "wrong", "are off by"),
    ("turn_positions", "turns", "wrong", "are off by"),
    ("greedy_kernel", "sampling", "wrong", "largest logits are not those of torch"),
    ("sampling_kernel", "sampling", "wrong", "of 16 sampled tokens are not those of torch"),
]


def test_every_small_step_has_a_check() -> None:
    """Check that no kernel of small steps is without one, and that each is compared at least once."""
    kernels = {problem.kernel for problem in step_problems(2, 16, F32, CPU)}
    assert kernels == set(STEPS)
    for kernel in kernels:
        assert any(StepCheck(kernel, 16, F32)._is_of(problem) for problem in step_problems(2, 16, F32, CPU))


@pytest.mark.parametrize("name", CHECKS)
def test_right_kernels_pass(name: str) -> None:
    assert run_check(CHECKS[name], CPU) == ""


@pytest.mark.parametrize(("kernel", "check", "way", "reason"), BREAKS)
def test_broken_kernels_fail(kernel: str, check: str, way: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*broken(kernel, way))
    found = run_check(CHECKS[check], CPU)
    assert reason in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_too_little_memory_does_not_mean_a_broken_kernel(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LaunchCheck, device: torch.device) -> None:
        raise error

    monkeypatch.setattr(LaunchCheck, "run", fail)
    assert run_check(LaunchCheck(), CPU) == "out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_what_is_checked_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    models = ("llama-8b", "llama-8b:int8", "llama-8b:w-int4", "qwen3.5-9b", "gpt-oss-20b")
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compiled_checks", str(capability), *models],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"\d+ variants\n", done.stdout), done.stdout
    assert int(done.stdout.split()[0]) > 60


def test_checks_are_sent_as_json() -> None:
    checks = list(CHECKS.values())
    assert decode(encode(checks)) == checks
    assert [repr(one) for one in decode(encode(checks))] == [repr(one) for one in checks]


# -- Processes.

LAUNCH, SPLIT, INT8, INT4, FP8 = (CHECKS[name] for name in ("launch", "split", "int8", "int4", "fp8"))
READY, PASSED = {"ready": ""}, {"reason": "", "last": False}


def test_a_crash_and_a_hang_cost_one_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN_KERNELS", "combine=crash,grouped_product=hang")
    outcome = Checker(CPU, child="tests.model.broken_kernels", check_seconds=4).run([LAUNCH, SPLIT, INT8])
    assert outcome.passed == [LAUNCH]
    assert outcome.failed == {SPLIT: "its process ended by signal SIGABRT", INT8: "it was not done after 4 s"}
    assert outcome.unchecked == ""


def scripted(
    script: list[list[object]], checks: Sequence[Check], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    (folder / "script").write_text(json.dumps(script))
    monkeypatch.setenv("SCRIPTED_CHECKS", str(folder / "script"))
    return Checker(CPU, child="tests.model.scripted_checks", check_seconds=1).run(checks)


def test_another_process_does_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"reason": "CUDA error: an illegal memory access was encountered", "last": True}
    script = [[READY, PASSED, lost], [READY, "crash"], [READY, "hang"], [READY, PASSED]]
    outcome = scripted(script, [LAUNCH, SPLIT, INT8, INT4, FP8], tmp_path, monkeypatch)
    assert outcome.passed == [LAUNCH, FP8]
    assert list(outcome.failed) == [SPLIT, INT8, INT4]
    assert outcome.failed[SPLIT] == lost["reason"]


def test_nothing_else_is_tried_if_nothing_can_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, reason in ({"reason": "no compiler", "last": False}, "no compiler"), ("crash", "its process ended by"):
        outcome = scripted([[READY, answer]], [LAUNCH, INT8, FP8], tmp_path, monkeypatch)
        assert not outcome.passed
        assert set(outcome.failed) == {LAUNCH, INT8, FP8}
        assert all(found.startswith(reason) for found in outcome.failed.values())


def test_processes_end_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [AttentionCheck(ROTARY, F32, F32, True, False, 8, 9, keys) for keys in range(20)]
    outcome = scripted([[READY, "crash"]] * 20, checks, tmp_path, monkeypatch)
    assert len(json.loads((tmp_path / "script").read_text())) == 12
    assert set(outcome.failed) == set(checks)
    assert outcome.failed[checks[-1]] == "it was not checked, as 8 others crashed"
    outcome = scripted([[READY, "hang"]] * 3, checks, tmp_path, monkeypatch)
    assert len(json.loads((tmp_path / "script").read_text())) == 1
    assert outcome.failed[checks[1]] == "it was not done after 1 s"
    assert outcome.failed[checks[2]] == "it was not checked, as 2 others hung"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([[{"ready": "out of memory"}]], "out of memory"),
        ([[READY, PASSED, {"reason": "out of memory", "last": False}]], "out of memory"),
        ([["crash"]], "the process that checks kernels ended by signal SIGABRT"),
        ([], "the process that checks kernels ended with exit code 1"),
    ],
)
def test_kernels_are_used_unchecked_if_no_process_can_check_them(
    script: list[list[object]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = scripted(script, [LAUNCH, INT8], tmp_path, monkeypatch)
    assert outcome.failed == {}
    assert outcome.unchecked == reason


# -- What was found is remembered.


def test_passed_checks_are_not_repeated(tmp_path: Path) -> None:
    memory = Memory(identity_of(CPU), tmp_path / "made")
    assert memory.unknown([LAUNCH, INT8]) == [LAUNCH, INT8]
    memory.add([LAUNCH])
    assert Memory(identity_of(CPU), tmp_path / "made").unknown([LAUNCH, INT8]) == [INT8]
    memory.add([INT8])
    assert memory.unknown([LAUNCH, INT8]) == []
    assert Memory(identity_of(CPU) | {"driver": "other"}, tmp_path / "made").unknown([LAUNCH]) == [LAUNCH]


def test_changed_kernels_are_checked_again() -> None:
    known = {file.relative_to(MODEL) for file in source_files()}
    launching = {file.relative_to(MODEL) for file in MODEL.rglob("*.py") if "import triton" in file.read_text()}
    assert Path("engine/execution/triton_static_row.py") in launching
    assert launching <= known


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"identity": {}, "passed": []}', '{"passed": 3}', "others", "link", "folder"]
)
def test_a_damaged_file_counts_as_empty(damage: str, tmp_path: Path) -> None:
    memory = Memory(identity_of(CPU), tmp_path)
    memory.add([LAUNCH])
    (file,) = tmp_path.iterdir()
    if damage == "others":
        file.chmod(0o666)
    elif damage == "folder":
        tmp_path.chmod(0o777)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text(damage)
    assert memory.unknown([LAUNCH]) == [LAUNCH]
    tmp_path.chmod(0o700)
    memory.add([LAUNCH])
    assert json.loads(file.read_text())["identity"] == identity_of(CPU)


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    Memory(identity_of(CPU), tmp_path / "file").add([LAUNCH])
