"""Other engines, measured with the same models and workloads if installed: `pip install -e '.[peers]'`.

Each has a module here with a class `Engine(path, settings)`, which runs in its own process and whose `run(workload)`
returns a `Run`, or raises `Unsupported`; those that run encoders also have `embed(texts)`. Each gets the settings that
suit it best for the same work: all requests at once, exact lengths, as many threads as torch uses.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lab.bench.batches import Workload
from lab.bench.ours import Run


class Unsupported(Exception):
    """Says that a peer cannot do a workload; the message is the reason."""


class Engine(Protocol):
    """Declares the class of a peer."""

    info: dict[str, Any]

    def run(self, workload: Workload) -> Run: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes a peer and the models it supports."""

    module: str  # in this package
    forms: str  # of models: D decoders, E encoder-decoders, S those that read sound, N encoders, V that read pictures
    packages: tuple[str, ...] = ()  # to install
    environment: str | None = None  # its own, which `lab.bench.peers.environments` makes

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(_module_of(name)) is None]


def _module_of(package: str) -> str:
    return package.replace("-", "_").removesuffix("_python")


PEERS = {
    "transformers": Peer("static", "DENV", ("transformers",)),
    "transformers-continuous": Peer("continuous", "D", ("transformers",)),
    "ctranslate2": Peer("ctranslate", "DES", ("ctranslate2", "transformers")),
    "openvino-genai": Peer("ov", "DNV", ("openvino-genai", "openvino", "transformers")),
    "llama.cpp": Peer("llama_cpp_server", "D", ("llama-cpp-python", "gguf")),
    "openvino-int8": Peer("ov_int8", "NV", ("openvino", "nncf", "transformers")),
    "onnxruntime-int8": Peer("ort", "N", ("onnxruntime", "onnx", "transformers")),
    "vllm": Peer("vllm_engine", "DN", environment="vllm"),
}


def load(name: str, path: Path, settings: dict[str, Any]) -> Engine:
    """Load the model in `path` with the engine `name`."""
    engine: type[Any] = importlib.import_module(f"{__name__}.{PEERS[name].module}").Engine
    loaded: Engine = engine(path, settings)
    return loaded
