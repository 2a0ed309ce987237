"""vLLM's engine on the CPU, for decoders and encoders, in an environment of its own (see `environments`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from lab.bench.batches import Ids, Workload
from lab.bench.ours import Run

SEQUENCES = 64
_FITTING = -1  # the longest sequence that fits in the cache


class Engine:
    """Runs its offline `LLM`, in this process."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import vllm

        self.encodes = settings["form"] == "N"
        options: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": _FITTING}
        if self.encodes:
            from vllm.config import PoolerConfig

            options = {"runner": "pooling", "pooler_config": PoolerConfig(seq_pooling_type="MEAN")}
        self.llm = vllm.LLM(
            model=str(prefixed(path)),
            dtype=settings["dtype"],
            max_num_seqs=SEQUENCES,
            disable_log_stats=False,  # the times of first tokens
            seed=0,
            **options,
        )
        self.parameters = vllm.SamplingParams
        self.info = {"version": importlib.metadata.version("vllm")}

    def run(self, workload: Workload) -> Run:
        if self.encodes:
            began = time.perf_counter()
            self.embed([ask.ids for ask in workload.asks])
            return Run(time.perf_counter() - began)
        prompts = [{"prompt_token_ids": list(ask.ids)} for ask in workload.asks]
        parameters = [
            self.parameters(
                temperature=workload.temperature, max_tokens=ask.output_tokens, ignore_eos=True, detokenize=False
            )
            for ask in workload.asks
        ]
        began = time.monotonic()  # the clock of its figures
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.monotonic() - began
        if [len(one.outputs[0].token_ids) for one in outputs] != [ask.output_tokens for ask in workload.asks]:
            raise RuntimeError("outputs of other lengths than requested")
        return Run(seconds, sorted(one.metrics.first_token_ts - began for one in outputs))

    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        """Return the mean of the last hidden states of each text, of length one."""
        prompts = [{"prompt_token_ids": list(ids)} for ids in texts]
        return [list(one.outputs.embedding) for one in self.llm.embed(prompts, use_tqdm=False)]


def variables(environment: Path, cache_gb: int) -> dict[str, str]:
    """Return the environment variables with which vLLM uses all cores, as its documentation says for a CPU."""
    preloaded = (next(environment.rglob(name)) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"))
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gb),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def prefixed(folder: Path) -> Path:
    """Return a copy of a Llama's folder whose tensors have the `model.` of published checkpoints; others as is."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "llama":
        return folder
    copy = folder.parent / f"{folder.name}-prefixed"
    if not (copy / "config.json").exists():
        copy.mkdir(exist_ok=True)
        tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "tokenizer.json", copy)
        (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        shutil.copy(folder / "config.json", copy)
    return copy
