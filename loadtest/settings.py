"""The settings of a run, as plain data, which is sent to the worker processes and written into the result."""

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
    """Sets the requests of a run. Lengths are in tokens, written as in `triptych.loadtest.workload.distributions`."""

    kind: str = "synthetic"
    prompt_tokens: str = "uniform:32-256"
    output_tokens: str = "uniform:16-64"
    prefixes: int = 0  # number of shared prefixes
    prefix_tokens: int = 128
    zipf: float = 1.0  # popularity of prefix k is 1 / k ** zipf
    turns: str = "uniform:2-5"  # of a conversation
    think_s: float = 1.0  # mean pause before the next turn, exponentially distributed
    texts: str = "fixed:8"  # number of texts in an embedding request
    ratio: float = 1.0  # seq2seq: output tokens per source token
    ratio_sigma: float = 0.2  # log-normal noise on it
    file: str = ""  # replay: JSON lines
    speed: float = 1.0  # replay: 2 is twice as fast as recorded


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Sets the times of requests. `stages` are (requests a second, seconds)."""

    kind: str = "closed"
    rate: float = 0.0  # requests a second; of a ramp, at its start
    concurrency: int = 8  # closed loop: clients that wait for each reply
    burstiness: float = 1.0  # gamma: the shape; 1 is Poisson, below 1 is burstier, above 1 more regular
    ramp_to: float = 0.0
    stages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Clients:
    """Sets the clients' behaviour. Fractions are of all requests; a request has at most one of these habits."""

    cancel: float = 0.0  # disconnect in the middle of the output
    slow: float = 0.0  # read slowly
    slow_rate: float = 10.0  # events a second that slow clients read
    retry: float = 0.0  # honour Retry-After
    max_retries: int = 3
    stream: bool = True
    ignore_eos: bool = True  # so that outputs have their planned lengths
    timeout_s: float = 120.0
    max_concurrency: int = 0  # of open arrivals; 0: unlimited. Waiting counts as latency.
    extra: dict[str, Any] = field(default_factory=dict)  # fields for every body


@dataclass(frozen=True, slots=True)
class Settings:
    """Sets one run."""

    url: str
    target: str
    model: str = ""
    workload: Workload = field(default_factory=Workload)
    arrivals: Arrivals = field(default_factory=Arrivals)
    clients: Clients = field(default_factory=Clients)
    duration_s: float = 30.0  # of arrivals; 0: only `requests` limits the run
    requests: int = 0  # maximum number; 0: only the duration limits the run
    warmup_s: float = 0.0  # requests scheduled before are not counted
    drain_s: float = 60.0  # after the last arrival; a request without a reply then has failed
    workers: int = 1
    seed: int = 0
    max_lag_ms: float = 10.0  # p99 lag of the generator above which the run is invalid
    max_model_len: int = 0  # of the served model, if known; requests are limited to it

    @property
    def embeds(self) -> bool:
        return self.target in EMBEDDING_TARGETS

    @property
    def streams(self) -> bool:
        return self.clients.stream and not self.embeds
