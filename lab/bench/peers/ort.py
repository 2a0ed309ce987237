"""ONNX Runtime with an encoder in int8: its transformer optimiser, then `quantize_dynamic`.

Weights are quantised by output, activations in each product, all rows by one scale. Each thread runs batches of its
own: a third faster than all threads on one batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from lab.bench.batches import BenchRequest, Ids, Workload
from lab.bench.ours import Run
from lab.bench.peers.batches import batches, padded
from lab.bench.peers.static import load_model

_BATCH = 4
_OPSET = 17


class Engine:
    """Runs the encoder of `path`, which is exported and quantised once."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        exported = path.parent / f"{path.name}-onnx-int8"
        if not exported.exists():  # in another process, whose memory does not count
            command = [sys.executable, "-m", "lab.bench.peers.ort", str(path), str(exported)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(exported / "model.onnx", options, ["CPUExecutionProvider"])
        self._threads = ThreadPoolExecutor(torch.get_num_threads())
        self.info = {"version": onnxruntime.__version__, "precision": "int8, float32"}

    def run(self, workload: Workload) -> Run:
        work = list(batches(workload, _BATCH))[::-1]  # the longest first, so that no thread waits for one
        began = time.perf_counter()
        found = list(self._threads.map(self._vectors, work))
        seconds = time.perf_counter() - began
        if sum(map(len, found)) != len(workload.asks):
            raise RuntimeError("not every text has an embedding")
        return Run(seconds)

    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        """Return the vector of each text."""
        return [self._vectors([BenchRequest(ids)])[0].tolist() for ids in texts]

    def _vectors(self, batch: list[BenchRequest]) -> Any:
        """Return the vectors `[B, D]` of a batch."""
        ids, mask = padded(batch, left=False)
        return self._session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


class _Encoder(nn.Module):
    """Takes a mask of two dimensions and transformers' own attention, which the optimiser recognises."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the mean of the last hidden states `[B, D]` of ids and mask `[B, L]`."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask[..., None].to(hidden.dtype)
        mean: Tensor = (hidden * seen).sum(1) / seen.sum(1)
        return mean


def export(path: Path, folder: Path) -> None:
    """Write the model of `path` in int8 into `folder`, as `model.onnx`."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model

    model = load_model(path, {"dtype": "float32"})
    model.set_attn_implementation("eager")
    ids = torch.full((2, 7), 100)
    names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "length"}
    making = folder.with_name(f".{folder.name}-{os.getpid()}")
    making.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=making.parent) as scratch:
        plain, fused = f"{scratch}/plain.onnx", f"{scratch}/fused.onnx"
        torch.onnx.export(
            _Encoder(model),
            (ids, torch.ones_like(ids)),
            plain,
            dynamo=False,  # what the optimiser was written for
            input_names=names,
            output_names=["mean"],
            dynamic_axes=dict.fromkeys(names, axes),
            opset_version=_OPSET,
        )
        heads, hidden = model.config.num_attention_heads, model.config.hidden_size
        optimize_model(plain, "bert", num_heads=heads, hidden_size=hidden, opt_level=0).save_model_to_file(fused)
        quantize_dynamic(
            fused,
            making / "model.onnx",
            weight_type=QuantType.QInt8,
            per_channel=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # of what fused operators give
        )
    making.rename(folder)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
