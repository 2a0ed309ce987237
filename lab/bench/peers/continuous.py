"""The continuous batching of transformers, in bfloat16, or in float32 if triptych uses that.

The cache is as large as the workload needs, with the default page size. Prompts are computed in chunks, so that a
step's mask stays small. The search for common prefixes is off, as there are none.
"""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lab.bench.batches import Workload
from lab.bench.ours import Run
from lab.bench.peers import Unsupported
from lab.bench.peers.static import load_model

_PAGE = 256  # tokens; the default
_STEP_TOKENS = 512
_NEVER = -1  # no token ends an output


class Engine:
    """Runs its manager, which is reused while the workload stays the same."""

    def __init__(self, path: Path, settings: dict[str, Any], model: Any = None) -> None:
        """`model`: use this network, and nothing from `path`."""
        self.model = load_model(path, settings) if model is None else model
        self.info = {"version": transformers.__version__}
        self._pages = 0
        self._manager: Any = None

    def run(self, workload: Workload) -> Run:
        if workload.beams > 1:
            raise Unsupported("no beam search in its continuous batching")
        manager = self._manager_for(workload)
        lengths: dict[str, int] = {}
        first: list[float] = []
        began = time.perf_counter()
        for ask in workload.asks:
            name = manager.add_request(
                list(ask.ids), max_new_tokens=ask.output_tokens, record_timestamps=True, eos_token_id=_NEVER
            )
            lengths[name] = ask.output_tokens
        while lengths:
            output = manager.get_result(timeout=1)
            if output is None and not manager.is_running():
                raise RuntimeError("its generation thread ended")
            if output is None or not output.is_finished():
                continue
            if output.error or len(output.generated_tokens) != lengths.pop(output.request_id):
                raise RuntimeError(output.error or "an output of another length than requested")
            first.append(output.timestamps[0] - began)
        return Run(time.perf_counter() - began, sorted(first))

    def close(self) -> None:
        """End its thread, which would keep the cache and disturb the next measurement."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
            self._manager = None

    def _manager_for(self, workload: Workload) -> Any:
        """Return a running manager whose cache holds all of `workload`; it is made in a run that is not counted."""
        pages = sum(-(-(len(ask.ids) + ask.output_tokens) // _PAGE) for ask in workload.asks)
        if self._manager is None or pages > self._pages:
            self.close()
            self._pages = pages
            sizes: dict[str, Any] = {_page_setting(): _PAGE, "num_blocks": pages + 1, "max_batch_tokens": _STEP_TOKENS}
            self._manager = self.model.init_continuous_batching(
                generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=_NEVER, pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **sizes),
            )
            with torch.inference_mode():
                self._manager.start()
        return self._manager


def _page_setting() -> str:
    """Return the name of the setting for the page size, which changed after 5.17."""
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    return "page_size" if "page_size" in known else "block_size"


def random_engine(raw: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Engine:
    """Return an engine over the network of a raw config.json, with the library's random weights."""
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device(device):  # weights are initialised on the device
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return Engine(Path(), {}, model)
