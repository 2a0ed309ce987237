"""Bodies and replies of the routes that load and unload models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.config import JsonDict

from service.core.models_folder import NAME_PATTERN
from service.schemas.types import Body, Reply
from service.settings.option_table import REQUEST_OPTIONS

Name = Annotated[str, Field(min_length=1, max_length=256)]
Setting = str | int | float | bool
ModelStateName = Literal["loaded", "loading", "unloading", "available", "unloaded", "failed"]

_SETTINGS: JsonDict = {option.name: {"description": option.help} for option in REQUEST_OPTIONS}


class LoadBody(Body):
    """Load a model, and serve it by `name`."""

    name: Name = Field(
        description=f"The name to serve it by. A new one matches `{NAME_PATTERN}`.", examples=["translate"]
    )
    path: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="A folder below `--models-dir`, or a model of the Hub (`hf:ORGANISATION/NAME@REVISION`); "
        "`--load-from` says what is allowed. Not needed for a model that `GET /models` lists.",
        examples=["opus-mt-en-de"],
    )
    settings: dict[str, Setting] = Field(
        default_factory=dict,
        description="Its engine settings, as a configuration file has them beside the path of a model.",
        examples=[{"dtype": "bfloat16", "max_model_len": 2048}],
        json_schema_extra={"properties": _SETTINGS, "additionalProperties": False},
    )
    pinned: bool = Field(
        False, description="Neither unload it when it is idle nor to make room for others.", examples=[False]
    )
    wait: bool = Field(
        True, description="Reply when it is loaded; false: reply at once with status 202.", examples=[True]
    )


class UnloadBody(Body):
    """Unload a model, or give up loading it."""

    name: Name = Field(description="The model.", examples=["translate"])
    drain_s: float | None = Field(
        None,
        ge=0,
        le=3600,
        description="Seconds that its running requests may take to end; then they are cancelled. "
        "Default: `--drain-timeout`.",
        examples=[30],
    )
    wait: bool = Field(
        True, description="Reply when its memory is free; false: reply at once with status 202.", examples=[True]
    )


class ModelState(Reply):
    """A model, as all replicas have it together."""

    name: str = Field(description="The name to use in requests.", examples=["translate"])
    state: ModelStateName = Field(
        description="`available` models are loaded when a request names them; `unloaded` ones by /models/load alone.",
        examples=["loaded"],
    )
    reason: str = Field(description="Why it failed, or is unloaded; else empty.", examples=[""])
    origin: Literal["start", "models-dir", "request"] = Field(
        description="Who named it: the start, `--models-dir`, or /models/load.", examples=["request"]
    )
    path: str = Field(description="Where it is loaded from.", examples=["hf:Helsinki-NLP/opus-mt-en-de"])
    pinned: bool = Field(description="Whether it stays loaded.", examples=[False])
    form: str = Field(description="Its form; empty if it is not known.", examples=["encoder-decoder"])
    memory_bytes: int = Field(description="Of weights and KV cache in one replica; 0: not loaded.", examples=[310_000])
    load_seconds: float = Field(description="How long loading took.", examples=[1.4])
    requests: int = Field(description="Requests that use it now.", examples=[0])
    idle_s: float = Field(description="Seconds since its last use, or since it was loaded or found.", examples=[12.5])
    replicas: dict[str, int] = Field(description="The number of replicas by state.", examples=[{"loaded": 2}])


class ModelStates(Reply):
    models: list[ModelState] = Field(description="All known models.")
    memory_bytes: int = Field(description="Of all loaded models in one replica.", examples=[310_000])
    memory_limit: int | None = Field(description="`--model-memory`; null: none.", examples=[8_000_000_000])
