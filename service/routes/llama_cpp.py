"""llama.cpp's route for editors, with the planner and streams of /generate."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.dialects import llama_cpp
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.llama_cpp import InfillBody
from triptych.service.http.bodies import read_body
from triptych.service.http.model_use import filling_model
from triptych.service.http.route_table import Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import FILL_MIDDLE
from triptych.service.routes import generate

routes = Routes("generate")

_MIDDLE = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))\n", "n_predict": 16}


@routes.post(
    "/infill",
    "Fill in the middle, as llama.cpp does",
    json_body(InfillBody, llama_cpp=Example(FILL_MIDDLE, _MIDDLE)),
    replies("What llama-server returns, or its events.", Any, events=(Any,)),
)
async def infill(request: Request) -> Response:
    """Works with llama.vim and llama.vscode. A prompt that is too long is cut."""
    body = await read_body(request, InfillBody)
    served = await filling_model(request, body.model, body.timeout_s)
    with service_of(request).handling(), naming_errors(names := llama_cpp.names(body)):
        found, shape = llama_cpp.infill(body, served), llama_cpp.shape(body)
        return await generate.answer_taken(
            request, found, lambda generation: llama_cpp.Infilled(generation, body), names, shape
        )
