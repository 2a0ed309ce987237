"""The command `triptych inspect`: prints a checkpoint's architecture, memory and cost as tables or JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.config.cache import paged_specs, pools_of, state_bytes
from triptych.model.engine.planning.cache_budget import KVLayout
from triptych.model.engine.planning.memory_plan import WeightPlan, cpu_formats, plan_weights
from triptych.model.errors import ConfigError
from triptych.model.inspection.anatomy import DTYPE_BYTES, Anatomy, describe_stack, dissect
from triptych.model.inspection.attention_maps import AttentionMap
from triptych.service.chat.abilities import folder_abilities
from triptych.service.cli.service_client import DEFAULT_URL
from triptych.service.planning.capabilities import Capability, capabilities
from triptych.service.runtimes.model_reader import read_model

_DTYPE = "float32"
_PROMPT = 128  # tokens of the prompt in the table of costs


def show(name: str, path: Path, *, context: int, memory: int) -> None:
    """Print tables of the checkpoint at `path`."""
    checkpoint = read_checkpoint(path)
    anatomy = dissect(checkpoint.config)
    console = Console()
    config = checkpoint.config
    console.print(f"\n[bold]{name}[/]  {config.form}, {config.model_type}, {anatomy.total_parameters:,} parameters")
    for warning in checkpoint.warnings:
        console.print(f"warning: {warning}", markup=False)
    console.print(_stacks(checkpoint))
    console.print(_parameters(anatomy))
    console.print(_costs(anatomy, context, memory))
    plans = _plans(checkpoint, memory)
    console.print(_weights_table(plans))
    if checkpoint.config.can_generate:
        console.print(_kv_table(plans, memory, checkpoint.config.max_positions))
        console.print(_chat(folder_abilities(path)), markup=False)
    for one in _capabilities(name, path):
        console.print(f"can {one.name}: {one.curl(DEFAULT_URL)}", markup=False, soft_wrap=True)


def print_json(name: str, path: Path, *, context: int, memory: int) -> None:
    """Print the same figures as one line of JSON."""
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    anatomy = dissect(config)
    print(
        json.dumps(
            {
                "schema": 1,
                "name": name,
                "form": config.form,
                "model_type": config.model_type,
                "max_positions": config.max_positions,
                "warnings": list(checkpoint.warnings),
                "stacks": {stack: describe_stack(one) for stack, one in config.stacks.items()},
                "capabilities": [one.to_json() for one in _capabilities(name, path)],
                "chat": folder_abilities(path) if config.can_generate else None,
                "classifier": list(config.classifier.labels) if config.classifier else None,
                "parameters": {**anatomy.parameters, "all": anatomy.total_parameters},
                "weight_bytes": {dtype: anatomy.weight_bytes(dtype) for dtype in DTYPE_BYTES},
                "kv_bytes_per_token": {dtype: anatomy.kv_bytes_per_token(dtype) for dtype in DTYPE_BYTES},
                "state_bytes": state_bytes(config.decoder),
                "flops_per_token": {
                    stack: {
                        "prompt_of": _PROMPT,
                        "prompt": anatomy.flops_per_prompt_token(stack, _PROMPT),
                        "context": context,
                        "step": asdict(anatomy.flops(stack, context)),
                    }
                    for stack in config.stacks
                },
                "cpu_memory": {kept: asdict(plan) for kept, plan in _plans(checkpoint, memory).items()},
                "sequences_that_fit": {
                    "memory": memory,
                    "length": context,
                    **{dtype: anatomy.sequences_that_fit(memory, context, dtype) for dtype in DTYPE_BYTES},
                },
            }
        )
    )


def write_attention(name: str, path: Path, text: str, out: Path) -> None:
    """Write the HTML page of all attention weights over `text`; raises `ConfigError`."""
    from triptych.model.inspection.attention_maps import attention_maps

    page = attention_page(name, text, attention_maps(path, text))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from None
    print(f"{out}: {len(page.encode()) / 1e6:.1f} MB")


def _capabilities(name: str, path: Path) -> list[Capability]:
    return capabilities(read_model(ModelSpec(name, str(path))))


def _chat(abilities: dict[str, Any]) -> str:
    """Return a line about chat: whether it is served, and the formats of tool calls and reasoning."""
    if not abilities["serves"]:
        return f"chat: no, {abilities['problem']}"
    tools = abilities["tools"] or f"no, {abilities['problem']}"
    return f"chat: yes; format of tool calls: {tools}; format of reasoning: {abilities['reasoning'] or 'none'}"


def _stacks(checkpoint: Checkpoint) -> Table:
    stacks = {name: describe_stack(stack) for name, stack in checkpoint.config.stacks.items()}
    table = Table("", *stacks, title="stacks", title_justify="left")
    for row in next(iter(stacks.values())):
        table.add_row(row, *(stack[row] for stack in stacks.values()))
    limit = checkpoint.config.max_positions
    contexts = dict.fromkeys(stacks, f"{limit} tokens" if limit else "unlimited")
    if checkpoint.config.vision is not None and (image := checkpoint.config.image) is not None:
        contexts["vision"] = f"{image.num_tokens} rows of an image"
    table.add_row("context", *contexts.values())
    return table


def _parameters(anatomy: Anatomy) -> Table:
    table = Table("part", "parameters", "share", title="parameters", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for part, count in sorted(anatomy.parameters.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{count:,}", f"{count / anatomy.total_parameters:.1%}")
    head = anatomy.config.head
    if head is not None and (head.tied or head.repeats_table):
        table.add_row("head", "0", "tied to the token table")
    table.add_section()
    table.add_row("all", f"{anatomy.total_parameters:,}", "")
    if (active := anatomy.active_parameters) is not None:
        table.add_row("used for a token", f"{active:,}", f"{active / anatomy.total_parameters:.1%}")
    for dtype in ("float32", "bfloat16"):
        table.add_row(f"bytes in {dtype}", _size(anatomy.weight_bytes(dtype)), "")
    return table


def _costs(anatomy: Anatomy, context: int, memory: int) -> Table:
    table = Table("cost", "value", title="costs", title_justify="left")
    table.columns[1].justify = "right"
    for stack in anatomy.config.stacks:
        prompt = anatomy.flops_per_prompt_token(stack, _PROMPT)
        table.add_row(f"{stack}: FLOPs a token of a prompt of {_PROMPT}", f"{prompt / 1e6:,.1f} M")
        step = anatomy.flops(stack, context)
        table.add_row(f"{stack}: FLOPs a token at context {context}", f"{step.all / 1e6:,.1f} M")
        table.add_row("  attention over the context, O(n d)", f"{step.attention / 1e6:,.1f} M")
        table.add_row("  feed-forward, O(d^2)", f"{step.feed_forward / 1e6:,.1f} M")
    if anatomy.config.decoder is not None:
        table.add_row(f"KV bytes a token ({_DTYPE})", f"{anatomy.kv_bytes_per_token(_DTYPE):,}")
        for pool in pools_of(paged_specs(anatomy.config.decoder, _DTYPE)):
            if pool.window is not None:
                kept = f"  {len(pool.layers)} layers with a window of {pool.window:,} tokens"
                table.add_row(kept, f"{pool.token_bytes:,}")
        if recurrent := state_bytes(anatomy.config.decoder):
            layers = len(anatomy.config.decoder.recurrences)
            table.add_row(f"bytes of a sequence's state in {layers} recurrent layers (float32)", f"{recurrent:,}")
        fitting = anatomy.sequences_that_fit(memory, context, _DTYPE)
        table.add_row(f"sequences of {context} tokens in {_size(memory)} of KV", f"{fitting:,}")
    return table


@dataclass(frozen=True, slots=True)
class _Plan:
    """The memory that a model needs on a CPU in one number format, in bytes, and the context that it can serve."""

    weights: dict[str, int]  # by part; a tied head is packed a second time
    buffer: int  # additional memory during loading
    kv_per_token: int
    context: int | None  # longest context in the given KV memory; None: no KV cache
    whole_context: int | None  # bytes of KV for the model's longest context; None: unlimited


def _plans(checkpoint: Checkpoint, memory: int) -> dict[str, _Plan]:
    """Plan the memory for each number format from the headers of the files, as an engine does before loading."""
    formats = cpu_formats(checkpoint.config).items()
    return {name: _plan(checkpoint, plan_weights(checkpoint, kept), kept.dtype, memory) for name, kept in formats}


def _plan(checkpoint: Checkpoint, weights: WeightPlan, dtype: torch.dtype, memory: int) -> _Plan:
    config, engine = checkpoint.config, EngineConfig()
    if not config.can_generate:
        return _Plan(weights.parts, weights.buffer, 0, None, None)
    kv, most = KVLayout.of(engine, config, dtype, engine.limits()), config.max_positions
    fits = kv.context_in(memory)
    return _Plan(
        weights.parts,
        weights.buffer,
        kv.token_bytes,
        context=fits if most is None else min(fits, most),
        whole_context=None if most is None else kv.bytes_for(most),
    )


def _columns(title: str, names: Iterable[str]) -> Table:
    table = Table("on a CPU", *names, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _weights_table(plans: dict[str, _Plan]) -> Table:
    table = _columns("memory of weights, from the headers of the files", plans)
    first = next(iter(plans.values()))
    for part in sorted(first.weights, key=lambda part: -first.weights[part]):
        table.add_row(part, *(_size(plan.weights[part]) for plan in plans.values()))
    table.add_section()
    table.add_row("all weights", *(_size(sum(plan.weights.values())) for plan in plans.values()))
    table.add_row("during loading", *(_size(plan.buffer) for plan in plans.values()))
    return table


def _kv_table(plans: dict[str, _Plan], memory: int, longest: int | None) -> Table:
    """Return a table with a column for each size of a token in the KV cache."""
    by_size = {plan.kv_per_token: (name, plan) for name, plan in reversed(plans.items())}
    kinds = dict(sorted(by_size.values(), key=lambda kind: -kind[1].kv_per_token))
    table = _columns("KV cache", kinds)
    table.add_row(f"longest context in {_size(memory)} of KV", *(f"{plan.context:,}" for plan in kinds.values()))
    if longest is not None:
        sizes = (_size(plan.whole_context or 0) for plan in kinds.values())
        table.add_row(f"KV of one request of {longest:,} tokens", *sizes)
    return table


def _size(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


_LEVELS = 255  # a weight is stored as one byte


def attention_page(model: str, text: str, maps: Sequence[AttentionMap]) -> str:
    """Return the page. It holds the weights as base64, and a script that draws them in the browser."""
    template = (resources.files("triptych.service") / "static" / "attention.html").read_text("utf-8")
    data = {
        "model": model,
        "text": text,
        "maps": [
            {
                "name": one.name,
                "layers": one.weights.shape[0],
                "heads": one.weights.shape[1],
                "queries": one.queries,
                "keys": one.keys,
                "weights": base64.b64encode(_as_bytes(one.weights)).decode(),
            }
            for one in maps
        ],
    }
    # "</script" inside the JSON would end the element, and "<!--<script" would hide its end.
    script = json.dumps(data).replace("<", "\\u003c")
    return template.replace("@@TITLE@@", escape(f"{model}: attention")).replace("@@DATA@@", script)


def _as_bytes(weights: torch.Tensor) -> bytes:
    return (weights * _LEVELS).round().to(torch.uint8).contiguous().numpy().tobytes()
