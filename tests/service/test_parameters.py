"""The table of parameters: a field that is missing somewhere fails at import; a body is planned in three passes."""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import Field

from tests.service.support import ask, make_app, opened
from triptych.model.api.parameters import Column, Parameter, internal, parameter, parameters_of
from triptych.model.api.request import PARAMETERS
from triptych.model.api.sampling_params import SAMPLING, SamplingParams
from triptych.service.dialects.common import DialectBody
from triptych.service.schemas import parameters
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import OPENAI, Parameters, native_body

PLANNING = str(Path("service", "planning"))


def test_a_field_of_sampling_must_be_declared() -> None:
    @dataclass
    class Params:
        known: int = parameter(0, "A number.")
        inner: int = internal(0)

    assert list(parameters_of(Params)) == ["known"]

    @dataclass
    class More(Params):
        forgotten: int = 0

    with pytest.raises(TypeError, match=r"More\.forgotten must be declared"):
        parameters_of(More)


def test_a_dialect_must_have_the_fields_that_the_table_names() -> None:
    class Body(DialectBody, Parameters):
        temperature: float | None = Field(None)

    with pytest.raises(TypeError, match="Body has no field max_tokens, which the table names for max_tokens"):
        OPENAI.body(Body)


def test_a_type_that_bodies_do_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Column("odd", set[int], None, Parameter(help="Odd."))
    monkeypatch.setattr(parameters, "PARAMETERS", {"odd": odd})
    with pytest.raises(TypeError, match="odd: a body has no fields of the type"):
        native_body(Parameters)


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("triptych.model.sampling.random_sampling", {"draws": True}),
        ("triptych.service.planning.checks", {"limit": "max_nothing"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_parameter_that_nothing_computes_or_limits_fails_at_import(
    monkeypatch: pytest.MonkeyPatch, module: str, change: dict[str, Any]
) -> None:
    column = SAMPLING["no_repeat_ngram_size"]
    monkeypatch.setitem(SAMPLING, column.name, replace(column, row=replace(column.row, **change)))
    with pytest.raises(TypeError, match=r"computed here|no settings"):
        runpy.run_module(module)


def test_every_parameter_reaches_the_engine() -> None:
    values: dict[Any, Any] = {int: 2, float: 0.5, int | None: 2, bool: True, tuple[int, ...]: [2]}
    app = make_app()
    for name, column in SAMPLING.items():
        if not column.row.sent or name in ("min_tokens", "num_beams") or column.row.beams.name == "ONLY":
            continue
        value = {"stop": ["x"], "logit_bias": {"2": -5.0}}.get(name, values.get(column.type))
        value = not column.default if column.type is bool else value
        reply = ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab", "max_tokens": 2, name: value})
        assert reply.status_code == 200, (name, reply.text)
        found = getattr(app.client.submitted[-1].params, name)
        assert found == {"stop": ("x",), "logit_bias": {2: -5.0}}.get(name, (2,) if value == [2] else value), name


def test_what_a_body_can_say_is_what_the_table_says() -> None:
    assert set(GenerateBody.model_fields) >= {name for name, one in PARAMETERS.items() if one.row.sent}
    assert not set(GenerateBody.model_fields) & {name for name, one in PARAMETERS.items() if not one.row.sent}
    assert replace(SamplingParams(), n=2).n == 2  # it stays a dataclass


def test_a_body_is_planned_in_three_passes() -> None:
    stops = asyncio.run(_planned(prompt=["ab", "abc"], stop="x", logprobs=1, max_tokens=4))
    returns = sum(module in stops[:at] for at, module in enumerate(stops))
    assert len(stops) <= 15 and returns <= 4, stops


async def _planned(**fields: Any) -> list[str]:
    """Return the modules of the planner in the order in which a body's way enters them."""
    stops: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and PLANNING in file and frame.f_code.co_name.isidentifier() and stops[-1:] != [file]:
            stops.append(file)

    app = make_app()
    async with opened(app):
        body = GenerateBody(model="gen", **fields)
        before = sys.getprofile()
        sys.setprofile(trace)
        try:
            await app.service.generate_planner.plan(body, "r", time.monotonic())
        finally:
            sys.setprofile(before)
    return [Path(one).name for one in stops]
