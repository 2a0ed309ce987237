"""A checkpoint with one changed JSON value is refused at load in one line, or answers; other models keep working."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.engine.file_fuzz import HEALTHY
from tests.engine.file_fuzz import KINDS as ALL_KINDS
from tests.model.checkpoints import saved

KINDS = ("llama-yarn", "t5-relu", "bert-sequence", "whisper")


def _fuzz(*arguments: str, kinds: Iterable[str], seconds: float) -> None:
    for kind in (*kinds, HEALTHY):
        saved(kind)  # in this process, which imports `transformers` anyway
    command = [sys.executable, "-m", "tests.engine.file_fuzz", *arguments, *kinds]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_changed_values_are_refused_or_answered() -> None:
    _fuzz("--seed", "1", "--most", "12", kinds=KINDS, seconds=300)


@pytest.mark.slow
def test_many_changed_values_are_refused_or_answered() -> None:
    _fuzz("--seed", "2", "--seconds", "300", kinds=ALL_KINDS, seconds=900)
