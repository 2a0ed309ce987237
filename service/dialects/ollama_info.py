"""Describes models as Ollama's lists do: `/api/tags`, `/api/show`, `/api/ps`."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Final

from triptych.model.api.stats import ModelInfo
from triptych.service.chat.abilities import chat_abilities
from triptych.service.core.models import ServedModel
from triptych.service.dialects.ollama import timestamp
from triptych.service.http.bodies import LATEST
from triptych.service.http.json_replies import Json
from triptych.service.images.pictures import processing_of
from triptych.service.lifecycle.state import Service

API_VERSION: Final = "0.35.0"  # the version of Ollama whose API this is: programs ask for a lowest one
_NEVER = "2300-01-01T00:00:00Z"  # the end of a model that stays loaded
_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INSERTS = "{{ .Prompt }}{{ .Suffix }}"  # programs look for `.Suffix` in a template
_PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_PARAMETERS |= {"repetition_penalty": "repeat_penalty"}


def listed(service: Service) -> list[Json]:
    """Return the models that this API can run, loaded ones first."""
    return [_entry(service, one) for one in service.models.candidates if abilities(service, one)]


def running(service: Service) -> list[Json]:
    """Return the loaded models, with the time at which each is unloaded if no more requests come."""
    found = []
    for served in service.models.candidates:
        info = service.client.models.get(served.name)
        if info is None or not served.loaded or not abilities(service, served):
            continue
        in_use = {
            "expires_at": _expiry(service, served.name),
            "size": info.memory_bytes,
            "size_vram": info.memory_bytes if info.device.startswith("cuda") else 0,
            "context_length": info.max_model_len,
        }
        found.append(_entry(service, served) | in_use)
    return found


def shown(service: Service, served: ServedModel) -> Json:
    """Return the description of one model."""
    info, config = service.client.models.get(served.name), served.config
    architecture, stack = config.model_type, next(iter(config.stacks.values()))
    context = config.max_positions if info is None else info.max_model_len
    model_info: Json = {
        "general.architecture": architecture,
        "general.basename": served.name,
        "general.parameter_count": None if info is None else info.parameters,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": stack.hidden_size,
        f"{architecture}.block_count": len(stack.layers),
        f"{architecture}.vocab_size": config.embedding.vocab_size,
    }
    defaults = {name: served.checkpoint.sampling_defaults.get(native) for native, name in _PARAMETERS.items()}
    parameters = {"num_ctx": context, **defaults}
    return {
        "license": "",
        "modelfile": f"FROM {served.name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items() if value is not None),
        "template": _INSERTS if "insert" in abilities(service, served) else "",
        "system": "",
        "details": _details(served, info),
        "model_info": {name: value for name, value in model_info.items() if value is not None},
        "capabilities": abilities(service, served),
        "modified_at": timestamp(service.created),
    }


def abilities(service: Service, served: ServedModel) -> list[str]:
    """Return what a model can do, in the API's words; none for models that classify or transcribe."""
    config, settings = served.config, service.settings
    if not served.reads_text or config.only_images or (served.loaded and served.tokenizer is None):
        return []
    if not config.can_generate:
        return ["embedding"] if config.classifier is None else []
    chat = chat_abilities(served.chat, "", tools=settings.tool_format, reasoning=settings.reasoning_format)
    marks = served.tokenizer and served.tokenizer.infilling(sentinels=served.is_encoder_decoder)
    sees = processing_of(served) and served.chat
    more = {"vision": sees, "tools": chat["tools"], "thinking": chat["reasoning"], "insert": marks}
    return ["completion", *(name for name, found in more.items() if found is not None)]


def moment(later_s: float = 0.0) -> str:
    """Return the time now, or some seconds later."""
    return timestamp(time.time() + later_s)


def _entry(service: Service, served: ServedModel) -> Json:
    info = service.client.models.get(served.name)
    return {
        "name": served.name + LATEST,
        "model": served.name + LATEST,
        "modified_at": timestamp(service.created),
        "size": 0 if info is None else info.weight_bytes,
        "digest": _digest(served),
        "details": _details(served, info),
        "capabilities": abilities(service, served),
    }


def _details(served: ServedModel, info: ModelInfo | None) -> Json:
    checkpoint, kind = served.checkpoint, served.config.model_type
    stored, files = checkpoint.quantization, checkpoint.weight_files
    dtype = checkpoint.dtype if info is None else info.dtype
    return {
        "parent_model": served.adapter_of,
        "format": "gguf" if files and files[0].suffix == ".gguf" else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": "" if info is None else _rounded(info.parameters),
        "quantization_level": (_FORMATS.get(dtype, dtype) if stored == "none" else stored).upper(),
    }


def _digest(served: ServedModel) -> str:
    """Return a digest of the name and the settings; the weights are not read for it."""
    return hashlib.sha256(f"{served.name}\0{served.config!r}".encode()).hexdigest()


def _rounded(count: int) -> str:
    """Return a number of parameters as the API writes it, such as `134.52M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if unit == "B" else f"{count / size:.2f}{unit}"
    return str(count)


def _expiry(service: Service, name: str) -> str:
    model = service.models[name]
    idle = 0.0 if model.users else time.monotonic() - model.used_at
    left = service.loader.keep_alive(model) - idle
    return _NEVER if math.isinf(left) else moment(max(0.0, left))
