"""Log lines of child processes: in the format of the process that started them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from triptych.model.system.child_process import engine_environment
from triptych.service.observability import logs

CHILD = """
import logging, warnings
from triptych.model.system.log_lines import log_as_parent
log_as_parent(rank=1)
logging.getLogger("triptych.some").warning("of a %s", "child")
warnings.warn("careful")
raise ValueError("the end")
"""


@pytest.mark.parametrize("log_format", ["json", "plain"])
def test_children_log_as_their_parent(log_format: str) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.setup(log_format, stream=sys.stderr)  # type: ignore[arg-type]
        environment = engine_environment()
    finally:
        root.handlers[:], root.level = before
    lines = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, stderr=subprocess.PIPE, text=True, check=False
    ).stderr.splitlines()
    if log_format == "plain":
        assert lines[0] == "WARNING triptych.some (rank 1): of a child" and "ValueError: the end" in lines
        return
    first, warning, last = map(json.loads, lines)
    assert (first["level"], first["logger"], first["message"], first["rank"]) == (
        *("WARNING", "triptych.some", "of a child"),
        1,
    )
    assert "careful" in warning["message"] and last["exception"].endswith("ValueError: the end")
