"""Other engines on the same folders and the same work, where they are installed (`pip install triptych[peers]`).

transformers computes padded batches sorted by length (static batching), CTranslate2 batches by tokens, all in int8.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from loadtest.bench.ours import Run
from loadtest.bench.workloads import Ask, Workload
from model.checkpoint import read_json

_BATCH = 32  # of padded batches


class Transformers:
    """The reference library, in bfloat16, static batches sorted by length."""

    name = "transformers"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import transformers

        dtype = torch.float32 if settings["dtype"] == "float32" else torch.bfloat16
        auto = {"llama": "CausalLM", "gpt2": "CausalLM", "t5": "Seq2SeqLM", "bart": "Seq2SeqLM"}
        kind = auto.get(read_json(path / "config.json")["model_type"], "")
        loader = getattr(transformers, f"AutoModelFor{kind}") if kind else transformers.AutoModel
        self.model = loader.from_pretrained(path, dtype=dtype).eval()
        self.info = {"version": transformers.__version__}

    @torch.inference_mode()
    def run(self, workload: Workload) -> Run:
        began = time.perf_counter()
        for batch in _batches(workload):
            ids, mask = _padded(batch, left=bool(batch[0].output_tokens) and not self.model.config.is_encoder_decoder)
            if not batch[0].output_tokens:
                self.model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)
                continue
            # Rows that need fewer tokens than their batch's longest still ride along: that is static batching.
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


class CTranslate2:
    """CTranslate2 with int8 weights: decoders and encoder-decoders."""

    name = "ctranslate2"

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        converted = path.parent / f"{path.name}-ctranslate2"
        if not converted.exists():
            with tempfile.TemporaryDirectory() as folder:
                _write_for_converter(path, Path(folder))
                TransformersConverter(folder).convert(str(converted), quantization="int8")
        decoder = read_json(path / "config.json")["model_type"] in ("llama", "gpt2")
        engine = ctranslate2.Generator if decoder else ctranslate2.Translator
        self.decoder = decoder
        self.engine = engine(str(converted), device="cpu", intra_threads=torch.get_num_threads())
        self.info = {"version": importlib.metadata.version("ctranslate2")}

    def run(self, workload: Workload) -> Run:
        began = time.perf_counter()
        for batch in _batches(workload):
            longest = max(ask.output_tokens for ask in batch)
            tokens = [[f"t{token}" for token in ask.ids] for ask in batch]
            if self.decoder:
                self.engine.generate_batch(
                    tokens, min_length=longest, max_length=longest, include_prompt_in_result=False
                )
            else:
                self.engine.translate_batch(
                    tokens, beam_size=workload.beams, min_decoding_length=longest, max_decoding_length=longest
                )
        return Run(time.perf_counter() - began)


PEERS = {"transformers": Transformers, "ctranslate2": CTranslate2}


def _batches(workload: Workload) -> Iterator[list[Ask]]:
    """Neighbours in length, so that little is padded."""
    asks = sorted(workload.asks, key=lambda ask: (ask.output_tokens, len(ask.ids)))
    for at in range(0, len(asks), _BATCH):
        yield asks[at : at + _BATCH]


def _padded(batch: list[Ask], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, L]`; a decoder's rows end at the right."""
    width = max(len(ask.ids) for ask in batch)
    ids, mask = torch.zeros(len(batch), width, dtype=torch.int64), torch.zeros(len(batch), width, dtype=torch.int64)
    for row, ask in enumerate(batch):
        at = slice(width - len(ask.ids), width) if left else slice(0, len(ask.ids))
        ids[row, at], mask[row, at] = torch.tensor(ask.ids), 1
    return ids, mask


def _write_for_converter(path: Path, folder: Path) -> None:
    """The model as CTranslate2's converter wants it: with settings that transformers no longer writes, and with a
    tokenizer whose token `t7` is id 7, since the work is in ids."""
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
