"""Other engines on the same folders and the same work, where they are installed: `pip install -e '.[peers]'`.

Each has a module here with a class `Engine(path, settings)`, made in a process of its own, whose `run(workload)`
answers as ours does. What it cannot do it says by raising `Unable`. Each is given what suits it best within the work
as it is asked: all requests at once, exact lengths, as many threads as torch takes.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loadtest.bench.batches import Workload
from loadtest.bench.ours import Run


class Unable(Exception):
    """A peer has no way to do what it was asked; the message is the reason."""


class Engine(Protocol):
    """What a peer's class is."""

    info: dict[str, Any]

    def run(self, workload: Workload) -> Run: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer is and what it can do."""

    module: str  # of this package
    forms: str  # of models: D decoders, E encoder-decoders, N encoders
    packages: tuple[str, ...]  # that pip installs

    @property
    def missing(self) -> list[str]:
        """Those of its packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name.replace("-", "_")) is None]


PEERS = {
    "transformers": Peer("static", "DEN", ("transformers",)),
    "transformers-continuous": Peer("continuous", "D", ("transformers",)),
    "ctranslate2": Peer("ctranslate", "DE", ("ctranslate2", "transformers")),
    "openvino-genai": Peer("ov", "DN", ("openvino-genai", "openvino", "transformers")),
}


def load(name: str, path: Path, settings: dict[str, Any]) -> Engine:
    """The engine `name` with the model in `path`, loaded."""
    engine: type[Any] = importlib.import_module(f"{__name__}.{PEERS[name].module}").Engine
    loaded: Engine = engine(path, settings)
    return loaded
