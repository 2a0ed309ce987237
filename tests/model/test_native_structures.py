"""Structures of the C stacks: each field has the same offset in C and Python, and no setting is ignored."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import triptych.model.native
from tests.model.checkpoints import saved
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.layer import LayerConfig
from triptych.model.native.structures import STRUCTURES
from triptych.model.network import native_coverage

KERNELS = Path(triptych.model.native.__file__).parent / "kernels"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC")
def test_fields_have_the_offsets_of_the_headers() -> None:
    lines = ["#include <stddef.h>", '#include "stack_context.h"', '#include "stack.h"']
    for structure in STRUCTURES:
        name = structure.__name__
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
        for field, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    command = ["gcc", "-x", "c", "-std=gnu11", "-march=native", "-fopenmp", "-fsyntax-only", "-I", str(KERNELS), "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def test_a_setting_that_c_does_not_read_leaves_the_layer_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = read_checkpoint(saved("llama-gqa").path).config.decoder
    assert stack is not None and native_coverage.unsupported_stack(stack) is None
    read = native_coverage._READ[LayerConfig].replace("residual_scale", "")
    monkeypatch.setitem(native_coverage._READ, LayerConfig, read)
    assert native_coverage.unsupported_stack(stack) is None  # it has the default
    scaled = replace(stack, layers=tuple(replace(layer, residual_scale=0.5) for layer in stack.layers))
    reason = native_coverage.unsupported_stack(scaled)
    assert reason == "layer 0 has LayerConfig.residual_scale, which C does not read"


@pytest.mark.parametrize("kind", list(native_coverage._READ))
def test_listed_settings_exist(kind: Any) -> None:
    assert set(native_coverage._READ[kind].split()) <= {field.name for field in fields(kind)}
