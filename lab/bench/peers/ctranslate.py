"""CTranslate2 with int8 weights, for decoders, encoder-decoders and Whisper, in batches sorted by length.

Of Whisper it runs what faster-whisper does: windows of a batch at once, from features to tokens.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter

from lab.bench.batches import NO_TIMESTAMPS, Workload, window
from lab.bench.ours import Run
from lab.bench.peers.batches import batches
from triptych.model.checkpoint.json_files import read_json


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
        self.config = read_json(path / "config.json")
        decoder = self.config["model_type"] in ("llama", "gpt2", "qwen3")
        if self.config["model_type"] == "whisper":
            threads = torch.get_num_threads()
            self.whisper = ctranslate2.models.Whisper(
                str(converted), device="cpu", compute_type="int8", intra_threads=threads
            )
            self.info = {"version": importlib.metadata.version("ctranslate2")}
            return
        engine = ctranslate2.Generator if decoder else ctranslate2.Translator
        self.decoder = decoder
        self.engine = engine(str(converted), device="cpu", intra_threads=torch.get_num_threads())
        self.info = {"version": importlib.metadata.version("ctranslate2")}

    def run(self, workload: Workload) -> Run:
        if self.config["model_type"] == "whisper":
            return self._transcribe(workload)
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

    def _transcribe(self, workload: Workload) -> Run:
        """Encode and decode all windows together; no output ends early, since its end is suppressed."""
        frames = [window(ask.ids, self.config["num_mel_bins"]) for ask in workload.asks]
        tokens = workload.asks[0].output_tokens
        began = time.perf_counter()
        results = self.whisper.generate(
            ctranslate2.StorageView.from_array(np.stack(frames)),
            [[self.config["decoder_start_token_id"], NO_TIMESTAMPS]] * len(frames),
            beam_size=workload.beams,
            max_length=2 * tokens,  # half of it may be output
            suppress_tokens=[self.config["eos_token_id"]],
            suppress_blank=False,
        )
        seconds = time.perf_counter() - began
        lengths = {len(result.sequences_ids[0]) for result in results}
        if lengths != {tokens}:
            raise RuntimeError(f"outputs of {lengths} tokens, {tokens} were requested")
        return Run(seconds)


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
    names = {number: f"t{number}" for number in range(config["vocab_size"])}
    if config["model_type"] == "whisper":  # which it finds by their names
        names |= {config["decoder_start_token_id"]: "<|startoftranscript|>", config["eos_token_id"]: "<|endoftext|>"}
        names |= {NO_TIMESTAMPS - 1: "<|nospeech|>", NO_TIMESTAMPS: "<|notimestamps|>"}
    words = WordLevel({name: number for number, name in names.items()}, unk_token="t3")
    special = {"unk_token": "t3", "bos_token": "t0", "eos_token": "t2", "pad_token": "t1"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
