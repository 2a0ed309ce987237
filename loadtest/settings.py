"""What a run is asked to do, as plain data: it goes to the worker processes and into the result as it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

PATHS: Final = {
    "generate": "/generate",
    "encode": "/encode",
    "openai-completions": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
EMBEDDING_TARGETS: Final = frozenset({"encode", "openai-embeddings"})
WORKLOADS: Final = ("synthetic", "chat", "conversation", "seq2seq", "embedding", "replay")
ARRIVALS: Final = ("closed", "constant", "poisson", "gamma", "ramp", "stages", "replay")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. Lengths are in tokens and written as `loadtest.workload.lengths` reads them."""

    kind: str = "synthetic"
    prompt_tokens: str = "uniform:32-256"
    output_tokens: str = "uniform:16-64"
    prefixes: int = 0  # so many shared beginnings; 0: none
    prefix_tokens: int = 128
    zipf: float = 1.0  # popularity of prefix k is 1 / k ** zipf
    turns: str = "uniform:2-5"  # of a conversation
    think_s: float = 1.0  # mean pause before a next turn, exponential
    texts: str = "fixed:8"  # of an embedding request
    ratio: float = 1.0  # seq2seq: output tokens for a source token
    ratio_sigma: float = 0.2  # log-normal noise on it
    file: str = ""  # replay: JSON lines
    speed: float = 1.0  # replay: 2 is twice as fast as recorded


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When it is asked. `stages` are (requests a second, seconds)."""

    kind: str = "closed"
    rate: float = 0.0  # requests a second; of a ramp, at its beginning
    concurrency: int = 8  # closed loop: clients that each wait for their answer
    burstiness: float = 1.0  # gamma: its shape; 1 is Poisson, less comes in bursts, more is more even
    ramp_to: float = 0.0
    stages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Clients:
    """How the clients behave. Fractions are of all requests; one request has at most one of the habits."""

    cancel: float = 0.0  # leave in the middle
    slow: float = 0.0  # read slowly
    slow_rate: float = 10.0  # events a second that a slow one takes
    retry: float = 0.0  # honour Retry-After
    max_retries: int = 3
    stream: bool = True
    ignore_eos: bool = True  # so that outputs have the planned lengths
    timeout_s: float = 120.0
    max_concurrency: int = 0  # of open arrivals; 0: no bound. Waiting for a place counts as latency.
    extra: dict[str, Any] = field(default_factory=dict)  # goes into every body


@dataclass(frozen=True, slots=True)
class Settings:
    """One run."""

    url: str
    target: str
    model: str = ""
    workload: Workload = field(default_factory=Workload)
    arrivals: Arrivals = field(default_factory=Arrivals)
    clients: Clients = field(default_factory=Clients)
    duration_s: float = 30.0  # arrivals stop then; 0: only `requests` bounds the run
    requests: int = 0  # at most so many; 0: only the duration bounds it
    warmup_s: float = 0.0  # what was scheduled before is not counted
    drain_s: float = 60.0  # after the last arrival; what has no answer then has failed
    workers: int = 1
    seed: int = 0
    max_lag_ms: float = 10.0  # a generator later than that (p99) makes the run invalid
    max_model_len: int = 0  # of the served model, where known; plans are cut to fit

    @property
    def embeds(self) -> bool:
        return self.target in EMBEDDING_TARGETS

    @property
    def streams(self) -> bool:
        return self.clients.stream and not self.embeds
