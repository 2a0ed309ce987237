"""CTranslate2 with int8 weights, for decoders and encoder-decoders, in batches sorted by length."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter

from loadtest.bench.batches import Workload
from loadtest.bench.ours import Run
from loadtest.bench.peers.batches import batches
from model.checkpoint.json_files import read_json


class Engine:
    """Runs its generator or translator."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        converted = path.parent / f"{path.name}-ctranslate2"
        if not converted.exists():
            with tempfile.TemporaryDirectory() as folder:
                _write_for_converter(path, Path(folder))
                making = converted.with_name(f".{converted.name}-{os.getpid()}")
                TransformersConverter(folder).convert(str(making), quantization="int8")
                making.rename(converted)
        decoder = read_json(path / "config.json")["model_type"] in ("llama", "gpt2", "qwen3")
        engine = ctranslate2.Generator if decoder else ctranslate2.Translator
        self.decoder = decoder
        self.engine = engine(str(converted), device="cpu", intra_threads=torch.get_num_threads())
        self.info = {"version": importlib.metadata.version("ctranslate2")}

    def run(self, workload: Workload) -> Run:
        began = time.perf_counter()
        for batch in batches(workload):
            longest = max(ask.output_tokens for ask in batch)
            tokens = [[f"t{token}" for token in ask.ids] for ask in batch]
            if self.decoder:
                results = self.engine.generate_batch(
                    tokens, min_length=longest, max_length=longest, include_prompt_in_result=False
                )
                lengths = {len(result.sequences[0]) for result in results}
            else:
                results = self.engine.translate_batch(
                    tokens, beam_size=workload.beams, min_decoding_length=longest, max_decoding_length=longest
                )
                lengths = {len(result.hypotheses[0]) for result in results}
            if lengths != {longest}:
                raise RuntimeError("outputs of other lengths than requested")
        return Run(time.perf_counter() - began)


def _write_for_converter(path: Path, folder: Path) -> None:
    """Write the model for CTranslate2's converter: with settings that transformers no longer writes, and with a
    tokenizer whose token `t7` has id 7, since workloads are ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    config = read_json(path / "config.json")
    bart = {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False}
    (folder / "config.json").write_text(json.dumps({**(bart if config["model_type"] == "bart" else {}), **config}))
    (folder / "model.safetensors").symlink_to((path / "model.safetensors").resolve())
    words = WordLevel({f"t{number}": number for number in range(config["vocab_size"])}, unk_token="t3")
    special = {"unk_token": "t3", "bos_token": "t0", "eos_token": "t2", "pad_token": "t1"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
