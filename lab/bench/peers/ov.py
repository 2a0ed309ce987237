"""OpenVINO, with GenAI's continuous batching for decoders and its own queue for encoders (ov_encoder.py).

It uses bfloat16 if the CPU has it, and its default KV cache of 8 bits. Where triptych has weights of 4 or 8 bits,
decoders get them too: in 4 bits in groups of 128, as published exports have them, with the tables in 8 bits.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import torch

from lab.bench.batches import Ids, Workload
from lab.bench.ours import Run
from lab.bench.peers import Unsupported
from lab.bench.peers.ov_encoder import EncoderQueue
from triptych.model.checkpoint.json_files import read_json

_CACHE_GB = 3  # as large as triptych's


class Engine:
    """Runs the model of `path`, which is exported once."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        if "num_experts" in read_json(path / "config.json"):
            raise Unsupported("transformers' experts are not exported")
        bits = settings["dtype"][:4] if settings["form"] == "D" and settings["dtype"].startswith("int") else ""
        exported = path.parent / "-".join(filter(None, (path.name, "openvino", bits)))
        if not exported.exists():  # in another process, whose memory does not count
            command = [sys.executable, "-m", "lab.bench.peers.ov_export", str(path), str(exported)]
            subprocess.run([*command, *filter(None, [bits])], check=True, stdout=sys.stderr)
        precision = "f32" if settings["dtype"] == "float32" else "bf16"
        self._pipeline: Any = None
        self._encoder: EncoderQueue | None = None
        if settings["form"] == "D":
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.cache_size = _CACHE_GB
            options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", options)
        else:
            self._encoder = EncoderQueue(exported / "openvino_model.xml", precision)
        self.info = {
            "version": openvino_genai.__version__,
            "precision": precision,
            "weights": bits or precision,
            "kv_cache": "u8",
        }

    def run(self, workload: Workload) -> Run:
        if workload.beams > 1:
            raise Unsupported("no exact lengths with beams")
        return self._generate(workload) if self._encoder is None else self._encoder.run(workload)

    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        assert self._encoder is not None
        return self._encoder.embed(texts)

    def _generate(self, workload: Workload) -> Run:
        """Submit all requests to its scheduler."""
        pipeline, handles, first = self._pipeline, [], []
        began = time.perf_counter()
        for number, ask in enumerate(workload.asks):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = ask.output_tokens, True, False
            ids = openvino.Tensor(np.array([ask.ids], dtype=np.int64))
            handles.append(pipeline.add_request(number, ids, config))
        waiting = list(handles)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now, before = time.perf_counter() - began, len(waiting)
            waiting = [handle for handle in waiting if not handle.can_read()]
            first += [now] * (before - len(waiting))
        seconds = time.perf_counter() - began
        lengths = [sum(len(output.generated_ids) for output in handle.read_all()) for handle in handles]
        if lengths != [ask.output_tokens for ask in workload.asks]:
            raise RuntimeError("outputs of other lengths than requested")
        return Run(seconds, first)
