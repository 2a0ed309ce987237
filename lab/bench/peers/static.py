"""transformers' `generate` on padded batches sorted by length, in bfloat16, or in float32 if triptych uses that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from lab.bench.batches import BenchRequest, Ids, Workload
from lab.bench.ours import Run
from lab.bench.peers.batches import batches, padded, pixel_values
from triptych.model.checkpoint.json_files import read_json

_AUTO = {
    "llama": "CausalLM",
    "qwen3": "CausalLM",
    "qwen3_moe": "CausalLM",
    "qwen3_5_text": "CausalLM",
    "gpt2": "CausalLM",
    "t5": "Seq2SeqLM",
    "bart": "Seq2SeqLM",
}


def load_model(path: Path, settings: dict[str, Any]) -> Any:
    """Load the model of `path` with transformers."""
    dtype = torch.float32 if settings["dtype"] == "float32" else torch.bfloat16
    kind = _AUTO.get(read_json(path / "config.json")["model_type"], "")
    loader = getattr(transformers, f"AutoModelFor{kind}") if kind else transformers.AutoModel
    return loader.from_pretrained(path, dtype=dtype).eval()


class Engine:
    """Runs `generate` on one batch after the other."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.model = load_model(path, settings)
        self._pictures: Any = getattr(self.model.config, "vision_config", None)
        self.info = {"version": transformers.__version__}

    @torch.inference_mode()
    def run(self, workload: Workload) -> Run:
        began = time.perf_counter()
        for batch in batches(workload):
            if self._pictures is not None:
                self._vectors(batch)
                continue
            ids, mask = padded(batch, left=bool(batch[0].output_tokens) and not self.model.config.is_encoder_decoder)
            if not batch[0].output_tokens:
                self.model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)
                continue
            # With static batching, rows that need fewer tokens run until the batch's longest has ended.
            longest = max(ask.output_tokens for ask in batch)
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                min_new_tokens=longest,
                max_new_tokens=longest,
                num_beams=workload.beams,
                do_sample=False,
            )
        return Run(time.perf_counter() - began)

    @torch.inference_mode()
    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        """Return the mean of the last hidden states of each text, or the vector of each picture."""
        if self._pictures is not None:
            return [self._vectors([BenchRequest(ids)])[0].float().tolist() for ids in texts]
        states = (self.model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts)
        return [hidden.float().mean(dim=0).tolist() for hidden in states]

    def _vectors(self, batch: list[BenchRequest]) -> Any:
        """Return the vectors `[B, D]` of pictures."""
        pixels = pixel_values(batch, self._pictures.image_size)
        return self.model.get_image_features(pixels.to(self.model.dtype)).pooler_output
