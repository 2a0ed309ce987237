"""llama.cpp's routes for editors and adapters, with the planner and streams of /generate."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.errors import NOT_SUPPORTED, invalid
from triptych.service.dialects import llama_cpp
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.llama_cpp import InfillBody, LoraScales
from triptych.service.http.bodies import json_response, named_model, read_body
from triptych.service.http.model_use import filling_model
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.capabilities import FILL_MIDDLE
from triptych.service.routes import generate

routes = Routes("generate")

_MIDDLE = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))\n", "n_predict": 16}


@routes.get(
    "/lora-adapters",
    "LoRA adapters, as llama.cpp lists them",
    replies("The adapters, with the ids that `lora` of /infill takes.", Any),
    MODEL_IN_QUERY,
)
async def lora_adapters(request: Request) -> Response:
    """Lists the adapters of the model that `?model=` names, or of all; their scale is 0 unless a request names one."""
    models, base = service_of(request).models, named_model(request, None)
    found = [one.name for one in models.candidates if one.adapter_of and base in (None, one.adapter_of)]
    return json_response([{"id": place, "path": name, "scale": 0.0} for place, name in enumerate(found)])


@routes.post(
    "/lora-adapters",
    "Scales of LoRA adapters, as llama.cpp sets them",
    json_body(LoraScales),
    replies("All scales are 0, as they were.", Any),
)
async def set_lora_adapters(request: Request) -> Response:
    """Accepts scale 0. Others would change the outputs of all clients: a request names its adapter itself."""
    body = await read_body(request, LoraScales)
    for place, one in enumerate(body.root):
        if one.scale:
            field = f"[{place}].scale"
            message = f"{field}: a request names its adapter itself, by `model` or by `lora` of /infill"
            raise invalid(message, field, NOT_SUPPORTED)
    return json_response({"success": True})


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
        return await generate.answer_in_handling(
            request, found, lambda generation: llama_cpp.Infilled(generation, body), names, shape
        )
