"""What the clients' programs share: the service's address, the questions, and how an outcome is printed.

It imports the standard library alone, as it runs in each client's environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, KEY = sys.argv[1:3]
SAMPLE = Path(__file__).parents[3] / "model" / "pretrained" / "checkpoints" / "speech" / "sample.flac"
TOKENIZER = SAMPLE.parents[1] / "assistant"  # a folder with a tokenizer
SAID = "the meeting is on the fifth of july at eighteen twenty three"

CHAT = "assistant"  # calls tools
HELLO = "Hello! What can I do for you?"  # what it answers to "Hello"
ASKED = "Is it warm in Oslo?"
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
RESULT = '{"temperature": 12, "sky": "cloudy"}'
ANSWER = "It is 12 degrees and cloudy in Oslo."
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEXTS = ["a cat on a mat", "a kitten on a rug", "a ship at sea"]


def feature(name: str) -> Callable[[Callable[[], Any]], None]:
    """Run the function (or coroutine) that follows, and print its outcome as a line of JSON."""

    def run(function: Callable[[], Any]) -> None:
        try:
            found = function()
            if inspect.isawaitable(found):
                found = asyncio.run(_wait(found))
            told = {"feature": name, "ok": True, "detail": str(found if found is not None else "")[:200]}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            told = {"feature": name, "ok": False, "detail": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(told), flush=True)

    return run


async def _wait(found: Any) -> Any:
    return await found


def expect(found: Any, wanted: Any) -> Any:
    """Return `found`, which must equal `wanted`."""
    if found != wanted:
        raise AssertionError(f"found {found!r}, expected {wanted!r}")
    return found


def expect_error(kind: type[Exception], function: Callable[[], Any]) -> str:
    """Return the error of this kind that the function must raise."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def expect_city(found: Any) -> Any:
    """Return `found`, an object of the schema CITY, which may be a text."""
    value = json.loads(found) if isinstance(found, str) else found
    if not (set(value) == {"city", "days"} and isinstance(value["city"], str) and 1 <= value["days"] <= 7):
        raise AssertionError(f"not of the schema: {found!r}")
    return value


def expect_alike(vectors: Any, size: int = 384) -> str:
    """Hold vectors of TEXTS to their sizes; the first two texts are nearer to each other than to the third."""
    first, second, third = ([float(number) for number in one] for one in vectors)
    if {len(first), len(second), len(third)} != {size}:
        raise AssertionError(f"vectors of {len(first)}, {len(second)} and {len(third)} numbers, expected {size}")
    near, far = (sum(a * b for a, b in zip(first, other, strict=True)) for other in (second, third))
    if not near > far + 0.2:
        raise AssertionError(f"near {near}, far {far}")
    return f"{near:.3f} > {far:.3f}"
