"""The command `adapters`, which compares triptych's LoRA adapters with vLLM's over HTTP, and with the base model.

Sixteen streams of equal length run again and again: all of the base model, all of one adapter, or two of each of eight.
Each kind has its turns, which alternate, on one server. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from lab.bench.models import CONFIGS, built
from lab.servers.servers import SERVERS, Server
from triptych.loadtest.runs import flags, output

_MODEL, _STREAMS, _ADAPTERS = "D2", 16, 8
_STD = 0.02
_KINDS = ("base", "one", "eight")


def add_command(commands: Any) -> None:
    text = "Compare the rates of LoRA adapters with the base model's, on triptych and on vLLM."
    parser = commands.add_parser("adapters", help="LoRA adapters, over HTTP", description=text)
    parser.add_argument("--servers", nargs="+", default=["triptych", "vllm"], choices=["triptych", "vllm"])
    parser.add_argument("--rank", type=flags.positive, default=16, metavar="R", help="rank of the adapters")
    parser.add_argument("--turns", type=flags.positive, default=3, metavar="N", help="measurements of each kind")
    parser.add_argument("--tokens", type=flags.positive, default=64, metavar="N", help="tokens of each stream")
    help_text = "vLLM without compiled graphs, whose first start with adapters takes some 15 minutes"
    parser.add_argument("--eager", action="store_true", help=help_text)
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="folder of benchmark models")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    folder = built(_MODEL, options.cache)
    adapters = {f"a{number}": _adapter(options.cache, options.rank, number) for number in range(_ADAPTERS)}
    found = {}
    for name in options.servers:
        rates = _measure(name, folder, adapters, options)
        found[name] = {kind: statistics.median(each) for kind, each in rates.items()}
        base = found[name]["base"]
        shown = (f"{kind} {rate:.1f} tokens/s ({rate / base:.0%})" for kind, rate in found[name].items())
        print(f"{name}: {', '.join(shown)}", flush=True)
    print(output.line({"kind": "adapters", "rank": options.rank, "eager": options.eager, "rates": found}))
    return 0


def _measure(
    name: str, folder: Path, adapters: Mapping[str, Path], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the tokens a second of each turn of each kind."""
    rates: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with _with_adapters(name, adapters, options).start(_MODEL, folder) as site:
        for turn in range(options.turns + 1):  # the first warms up
            for kind in _KINDS[:: 1 if turn % 2 else -1]:
                models = {"base": [_MODEL], "one": ["a0"], "eight": list(adapters)}[kind]
                rate = asyncio.run(_rate(site.url, models * (_STREAMS // len(models)), options.tokens))
                if turn:
                    rates[kind].append(rate)
    return rates


def _with_adapters(name: str, adapters: Mapping[str, Path], options: argparse.Namespace) -> Server:
    more = [part for one, path in adapters.items() for part in ("--lora", f"{one}={path}")]
    if name == "vllm":
        named = [f"{one}={path}" for one, path in adapters.items()]
        more = ["--enable-lora", "--max-loras", str(_ADAPTERS), "--max-lora-rank", str(max(8, options.rank))]
        more += ["--enforce-eager"] * options.eager + ["--lora-modules", *named]
    server = SERVERS[name]
    return replace(server, start=lambda model, folder: server.start(model, folder, *more))


async def _rate(url: str, models: list[str], tokens: int) -> float:
    """Return the tokens a second of streams of these models that begin together."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        prompts = [[5 + (7 * place + at) % 1000 for at in range(32)] for place in range(len(models))]
        began = time.monotonic()
        asked = zip(models, prompts, strict=True)
        replies = [client.post("/v1/completions", json={**body, "model": one, "prompt": ids}) for one, ids in asked]
        for reply in await asyncio.gather(*replies):
            reply.raise_for_status()
            assert reply.json()["usage"]["completion_tokens"] == tokens
        return len(models) * tokens / (time.monotonic() - began)


def _adapter(cache: Path, rank: int, number: int) -> Path:
    """Return the folder of a random adapter of all projections, which is written if missing."""
    folder = cache / f"{_MODEL}-lora-{rank}-{number}"
    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config, generator = CONFIGS[_MODEL], torch.Generator().manual_seed(number)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes = {f"self_attn.{name}": shape for name, shape in {**attention, "o_proj": (hidden, queries)}.items()}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    stored = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                drawn = torch.randn(shape, generator=generator) * _STD
                stored[f"{module}.lora_{matrix}.weight"] = drawn.bfloat16()
    save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = [name.split(".")[1] for name in shapes]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings |= {"target_modules": targets, "base_model_name_or_path": _MODEL, "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
