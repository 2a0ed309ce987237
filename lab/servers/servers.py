"""The servers that `python -m lab served` compares: how each is started with a benchmark model.

All compute in bfloat16 on every core, run 64 sequences at once, and reuse no prefix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.bench.peers import Unsupported
from lab.bench.peers.environments import made
from lab.bench.peers.vllm_engine import SEQUENCES, prefixed, variables
from lab.faults.site import Site

SEQUENCE_TOKENS = 2304  # of a prompt and its output, at most
_START_S = 2400.0  # at a first start vLLM compiles, for some 15 minutes on two busy cores
_CACHE_GB = 2


@dataclass(frozen=True, slots=True)
class Server:
    """Describes a server."""

    start: Callable[..., Site]  # of a benchmark model and its folder, with more options
    version: Callable[[], str]
    extra: str = "{}"  # fields of a completion, with which its events say how many tokens they have


def _triptych(*runtime: str) -> Callable[..., Site]:
    def start(name: str, folder: Path, *more: str) -> Site:
        options = (*runtime, "--no-prefix-caching", "--max-num-seqs", str(SEQUENCES), *more)
        return Site([f"{name}={folder}", *options], start_s=_START_S, every_core=True)

    return start


def _vllm(name: str, folder: Path, *more: str) -> Site:
    environment = made("vllm")
    options = ["--model", str(prefixed(folder)), "--served-model-name", name, "--host", "127.0.0.1"]
    options += ["--dtype", "bfloat16", "--max-num-seqs", str(SEQUENCES)]
    if name.startswith("N"):
        options += ["--runner", "pooling"]
    else:
        length = min(SEQUENCE_TOKENS, _config(folder)["max_position_embeddings"])
        options += ["--no-enable-prefix-caching", "--max-model-len", str(length)]
    return Site(
        [*options, *more],
        executable=environment / "bin" / "python",
        program=("-m", "vllm.entrypoints.openai.api_server"),
        ready_path="/health",
        start_s=_START_S,
        environment=variables(environment, _CACHE_GB),
        every_core=True,
    )


def _llama_cpp(*more: str) -> Callable[[str, Path], Site]:
    def start(name: str, folder: Path) -> Site:
        kind = _config(folder)["model_type"]
        if kind not in ("llama", "bert"):
            raise Unsupported("only Llama's decoders and BERT are written as GGUF with a vocabulary")
        cores = str(len(os.sched_getaffinity(0)))
        options = ["--model", str(_gguf(folder)), "--alias", name, "--host", "127.0.0.1", "--no-webui"]
        options += ["--parallel", str(SEQUENCES), "--batch-size", "2048"]
        options += ["--threads", cores, "--threads-batch", cores, *more]
        if kind == "bert":  # a text is computed in one piece
            tokens = SEQUENCES * _config(folder)["max_position_embeddings"]
            options += ["--ctx-size", str(tokens), "--ubatch-size", "2048", "--embeddings"]
        else:
            options += ["--ctx-size", str(SEQUENCES * SEQUENCE_TOKENS), "--no-cache-prompt"]
        executable = made("llama.cpp") / "llama-server"
        return Site(options, executable=executable, program=(), ready_path="/health", start_s=_START_S, every_core=True)

    return start


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _gguf(folder: Path) -> Path:
    """Return the model as a GGUF file with its vocabulary, which is written if missing, in a process of its own."""
    file = folder.parent / f"{folder.name}-served.gguf"
    if not file.exists():
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(made("llama.cpp") / "python")])}
        command = [sys.executable, "-m", "lab.servers.servers", str(folder), str(file)]
        subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
    return file


def _own_version() -> str:
    return f"torch {torch.__version__}"


SERVERS = {
    "triptych": Server(_triptych("--runtime", "local"), _own_version),
    "replicas-1": Server(_triptych("--runtime", "ray"), _own_version),
    "replicas-2": Server(_triptych("--runtime", "ray", "--replicas", "2"), _own_version),
    "replicas-2-unbound": Server(
        _triptych("--runtime", "ray", "--replicas", "2", "--cpu-binding", "off"), _own_version
    ),
    "vllm": Server(_vllm, lambda: made("vllm").name, '{"return_token_ids": true}'),
    "llama.cpp": Server(_llama_cpp(), lambda: made("llama.cpp").name),
    "llama.cpp-plain": Server(_llama_cpp("--no-repack"), lambda: made("llama.cpp").name),  # weights as they are stored
}


if __name__ == "__main__":
    from lab.bench.peers.llama_cpp_formats import write_gguf

    making = Path(sys.argv[2] + ".making")
    write_gguf(Path(sys.argv[1]), making, vocabulary=True)
    making.rename(sys.argv[2])
