"""Messages between the hub and a worker, as data: msgpack frames with a length before each, over a socket pair.

The order of messages counts: whoever reads one has read all that were sent before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from model.api.messages import Abort, ModelSpec
from model.api.request import EncodeOutput, EncodeRequest, Request, TokenOutput
from model.api.stats import Health, ModelInfo
from service.settings.serve_config import ServeConfig


class Hello(msgspec.Struct, tag=True):
    """The first message to a worker: what it serves and which one it is, from 1 on."""

    config: ServeConfig
    number: int
    columns: int  # of the shared counts; the worker writes the one of its number
    secret: bytes  # from which all workers make the same names of keys' holders


# -- models, as the hub's registry changes
#
# A change replaces what the model was. If it was loaded, `adoption` is that of this time, which is over; the worker
# repeats it in `settled` once no request of it can begin to hold the model.


class Loaded(msgspec.Struct, tag=True):
    """A model is served; `adoption` tells it from others of its name, before and after."""

    adoption: int
    spec: ModelSpec
    row: int  # of the shared counts
    info: ModelInfo | None  # None while the engine is started


class Available(msgspec.Struct, tag=True):
    """A model is loaded when a request names it."""

    name: str
    adoption: int | None
    path: str
    pickle: bool


class Refused(msgspec.Struct, tag=True):
    """Requests for a model get an error."""

    name: str
    adoption: int | None
    error: dict[str, Any]


class Removed(msgspec.Struct, tag=True):
    """A model is none of these any more."""

    name: str
    adoption: int | None


class AllSent(msgspec.Struct, tag=True):
    """All models that there were when the worker began have been told."""


Change = Loaded | Available | Refused | Removed

# -- the engine


class Outputs(msgspec.Struct, tag=True):
    """What a step computed for this worker."""

    tokens: list[TokenOutput]
    encoded: list[EncodeOutput]


class RawOutputs(msgspec.Struct, tag="Outputs"):
    """`Outputs` as the hub passes them on."""

    tokens: list[msgspec.Raw]
    encoded: list[msgspec.Raw]


class EngineLoaded(msgspec.Struct, tag=True):
    """The engine has loaded a model, again after a restart."""

    info: ModelInfo


class EngineDropped(msgspec.Struct, tag=True):
    """The engine is about to unload a model."""

    name: str


class EngineReady(msgspec.Struct, tag=True):
    """Requests are taken, if they come with this epoch."""

    epoch: int


class EngineLost(msgspec.Struct, tag=True):
    """The engine has gone with all requests."""

    reason: str


class EngineHealth(msgspec.Struct, tag=True):
    """The engine's health has changed."""

    health: Health


# -- questions and answers


class HoldModel(msgspec.Struct, tag=True):
    """A worker asks to hold a model that is not loaded, or that it does not know; answered by `Held` or `Failed`."""

    ask: int
    request_id: str
    name: str | None
    task: str
    deadline: float


class GiveUp(msgspec.Struct, tag=True):
    """A worker wants no answer any more."""

    ask: int


class HttpRequest(msgspec.Struct, tag=True):
    """A request to a route that the hub answers (`forwarding`)."""

    ask: int
    request_id: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Held(msgspec.Struct, tag=True):
    """The model is loaded, and the hub counts one more request of the worker that holds it."""

    ask: int
    name: str
    adoption: int


class Failed(msgspec.Struct, tag=True):
    """The fields of an `ApiError`."""

    ask: int
    error: dict[str, Any]


class HttpReply(msgspec.Struct, tag=True):
    ask: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class CancelRequest(msgspec.Struct, tag=True):
    """The hub asks to cancel the requests with a public id; answered by `Cancelled`."""

    ask: int
    request_id: str


class Cancelled(msgspec.Struct, tag=True):
    ask: int
    count: int


# -- life of a worker


class Listening(msgspec.Struct, tag=True):
    """The worker answers connections from now on."""


class Serving(msgspec.Struct, tag=True):
    """The worker has read the models of the start and knows the engine to be ready."""


class Report(msgspec.Struct, tag=True):
    """A sign of life, at least once a second."""

    accepted: int  # connections since the start of the worker
    open: int  # of them
    cache_bytes: int
    cache_entries: int


class Drain(msgspec.Struct, tag=True):
    """Refuse new requests; answered by `Drained` when the others have ended."""


class Drained(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    """End, without waiting for requests."""


# -- the frames of requests


class Work(msgspec.Struct, tag=True, omit_defaults=True):
    """What a worker's event loop has gathered in one turn."""

    epoch: int
    held: dict[int, int] = {}  # by adoption: requests that hold the model, more or fewer
    settled: list[int] = []  # adoptions that no request of the worker can begin to hold any more
    generate: list[Request] = []
    encode: list[EncodeRequest] = []
    abort: list[Abort] = []
    ended: list[str] = []  # requests that want no more outputs


class RawWork(msgspec.Struct, tag="Work"):
    """`Work` as the hub reads it."""

    epoch: int
    held: dict[int, int] = {}
    settled: list[int] = []
    generate: list[msgspec.Raw] = []
    encode: list[msgspec.Raw] = []
    abort: list[Abort] = []
    ended: list[str] = []


ToWorker = (
    Hello
    | Loaded
    | Available
    | Refused
    | Removed
    | AllSent
    | Outputs
    | EngineLoaded
    | EngineDropped
    | EngineReady
    | EngineLost
    | EngineHealth
    | Held
    | Failed
    | HttpReply
    | CancelRequest
    | Drain
    | Stop
)
ToHub = RawWork | HoldModel | GiveUp | HttpRequest | Cancelled | Listening | Serving | Report | Drained
