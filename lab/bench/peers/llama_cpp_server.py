"""llama.cpp with as many slots as requests, at most 64, as its server runs them.

Each step decodes a token of every slot that generates, and as many tokens of prompts as fit its batch of 2,048. In 4
bits the weights are Q4_0, in 8 bits Q8_0, else bfloat16.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import torch

from lab.bench.batches import BenchRequest, Workload
from lab.bench.ours import Run
from lab.bench.peers import Unsupported
from lab.bench.peers.llama_cpp_formats import be_quiet, quantised, write_gguf
from triptych.model.checkpoint.json_files import read_json

_SLOTS, _BATCH = 64, 2048


def form_of(number_format: str) -> str:
    """Return the name of llama.cpp's number format that is compared with ours."""
    if number_format.startswith("int4"):
        return "Q4_0"
    return "Q8_0" if number_format.startswith("int8") else "BF16"


@dataclass(slots=True)
class Slot:
    """Holds a request while it runs."""

    ask: BenchRequest
    computed: int = 0  # tokens of the prompt
    generated: int = 0
    last: int = 0  # token


class Engine:
    """Runs the model of `path`, which is written as GGUF once."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        if read_json(path / "config.json")["model_type"] not in ("llama", "qwen3", "qwen3_moe"):
            raise Unsupported("only Llama and Qwen3, also with experts")
        form = form_of(settings["dtype"])
        file = path.parent / f"{path.name}-{form}.gguf"
        if not file.exists():  # in another process, whose memory does not count
            command = [sys.executable, "-m", "lab.bench.peers.llama_cpp_server", str(path), form, str(file)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        self._quiet = be_quiet()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = False  # with weights packed again for the CPU (AMX) it crashed (0.3.36)
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), loading)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {file.name}")
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._context: Any = None
        self._room = (0, 0)  # slots, and tokens of each
        self.info = {"version": llama_cpp.__version__, "weights": form, "kv_cache": "f16"}

    def run(self, workload: Workload) -> Run:
        if workload.beams > 1:
            raise Unsupported("no beams")
        slots = min(_SLOTS, len(workload.asks))
        self._make_room(slots, max(len(ask.ids) + ask.output_tokens for ask in workload.asks))
        waiting, running, first = list(workload.asks), dict[int, Slot](), list[float]()
        began = time.perf_counter()
        while waiting or running:
            for number in range(slots):
                if number not in running and waiting:
                    running[number] = Slot(waiting.pop(0))
            for number in self._step(running):
                slot = running[number]
                if slot.generated == 1:
                    first.append(time.perf_counter() - began)
                if slot.generated == slot.ask.output_tokens:
                    llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
                    del running[number]
        return Run(time.perf_counter() - began, first)

    def _make_room(self, slots: int, tokens: int) -> None:
        """Make a context for `slots` sequences of `tokens` tokens, unless there is one."""
        tokens = tokens + -tokens % 256
        if self._context is not None and self._room[0] == slots and self._room[1] >= tokens:
            return
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = slots * tokens, slots
        settings.n_batch, settings.n_ubatch = _BATCH, 512
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._room = slots, tokens

    def _step(self, running: dict[int, Slot]) -> list[int]:
        """Compute one batch; returns the slots that got a token."""
        batch, asked = self._batch, list[tuple[int, int]]()
        batch.n_tokens = 0
        for number, slot in running.items():
            if slot.generated:
                asked.append((number, self._add(slot.last, len(slot.ask.ids) + slot.generated - 1, number, True)))
        for number, slot in running.items():
            ids = slot.ask.ids
            while slot.computed < len(ids) and batch.n_tokens < _BATCH:
                last = slot.computed == len(ids) - 1
                row = self._add(ids[slot.computed], slot.computed, number, last)
                slot.computed += 1
                if last:
                    asked.append((number, row))
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not compute a batch")
        for number, row in asked:
            running[number].last = llama_cpp.llama_sampler_sample(self._sampler, self._context, row)
            running[number].generated += 1
        return [number for number, _ in asked]

    def _add(self, token: int, position: int, slot: int, wanted: bool) -> int:
        """Put a token into the batch; returns its row."""
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, wanted
        batch.seq_id[row][0] = slot
        batch.n_tokens = row + 1
        return row


def export(folder: Path, form: str, file: Path) -> None:
    """Write `file` in llama.cpp's number format `form`."""
    plain, making = file.with_suffix(".plain"), file.with_suffix(".making")
    write_gguf(folder, plain)
    if form != "BF16":
        quantised(plain, making, form)
        plain.unlink()
    (plain if form == "BF16" else making).rename(file)


if __name__ == "__main__":
    export(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
