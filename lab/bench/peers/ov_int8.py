"""OpenVINO with an encoder in int8: quantised by its own quantiser, nncf, after training.

Weights and activations are 8-bit integers in all products of projections; the rest is bfloat16 if the CPU has it.
Weights compressed to 8 bits alone, with activations quantised as they come, are half as fast.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino

from lab.bench.batches import Ids, Scale, Workload, workloads
from lab.bench.ours import Run
from lab.bench.peers.batches import batches
from lab.bench.peers.ov_encoder import BATCH, EncoderQueue, inputs

_SEED = 1  # of the texts that ranges of activations are taken from: others than those that are measured
_TEXTS = 64


class Engine:
    """Runs the encoder of `path`, which is exported and quantised once."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        exported = path.parent / f"{path.name}-openvino-int8"
        if not exported.exists():  # in another process, whose memory does not count
            command = [sys.executable, "-m", "lab.bench.peers.ov_int8", str(path), str(exported)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        precision = "f32" if settings["dtype"] == "float32" else "bf16"
        self._encoder = EncoderQueue(exported / "openvino_model.xml", precision)
        self.info = {"version": openvino.__version__, "nncf": importlib.metadata.version("nncf")}
        self.info["precision"] = f"int8, {precision}"

    def run(self, workload: Workload) -> Run:
        return self._encoder.run(workload)

    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        return self._encoder.embed(texts)


def quantise(path: Path, folder: Path) -> None:
    """Write the model of `path` in int8 into `folder`, as `openvino_model.xml`."""
    import nncf

    from lab.bench.peers.ov_export import export
    from triptych.model.checkpoint.folder import read_checkpoint
    from triptych.model.checkpoint.json_files import read_json

    exported = path.parent / f"{path.name}-openvino"
    if not exported.exists():
        export(path, exported)
    vocab_size, config = read_checkpoint(path).config.embedding.vocab_size, read_json(path / "config.json")
    form = "V" if "vision_config" in config else "N"
    workload = workloads(form, vocab_size, Scale(seed=_SEED, at_most=_TEXTS))[-1]
    given = [inputs(batch, config) for batch in batches(workload, BATCH)]
    made = nncf.quantize(
        openvino.Core().read_model(exported / "openvino_model.xml"),
        nncf.Dataset(given),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.PERFORMANCE,  # the faster one: activations around zero too
        subset_size=len(given),
    )
    making = folder.with_name(f".{folder.name}-{os.getpid()}")
    making.mkdir(parents=True)
    openvino.save_model(made, making / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(path / "config.json", making)
    making.rename(folder)


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]))
