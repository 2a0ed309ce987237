"""Folders as the Hub has them, without safetensors and tokenizer.json: served as they are, equal to transformers.

Weights are random and small; file names, tensor names, tokenizer files and configurations are as published.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model.api.engine_config import EngineConfig
from model.api.request import SamplingParams
from model.llm import LLM
from tests.model.checkpoints import BART, BERT, GPT2, LLAMA, ROBERTA, T5, XLNET, randomise
from tests.model.tokenizer_folders import write_folder

SMALL = {"kv_cache_memory": 4 << 20, "device": "cpu", "dtype": "float32"}
TEXTS = ["Attention is a weighted sum.", "Grüße aus Köln, ça va?", "for name, tensor in files:  # 你好"]
NEW_TOKENS = 12
TIED = {"tie_word_embeddings": True}

# By the folder of tokenizer files: the class that wrote the weights, and its configuration.
GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "marian": ("MarianMTModel", {**BART, **TIED, "activation_function": "swish"}),
    "m2m-100": ("M2M100ForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "bart": ("BartForConditionalGeneration", {**BART, "scale_embedding": False}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama-legacy": ("MistralForCausalLM", {**LLAMA, "sliding_window": 16}),
    "gemma": ("GemmaForCausalLM", {**LLAMA, **TIED, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "bert-cased": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "albert": ("AlbertModel", {**BERT, "embedding_size": 12}),
    "xlnet": ("XLNetModel", XLNET),
}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as root:
        yield Path(root)


def published(root: Path, name: str, architecture: str, settings: dict[str, Any]) -> tuple[Path, Any, Any]:
    """The folder, the reference library's tokenizer of it and the model that wrote it."""
    folder = write_folder(name, root / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model_class = getattr(transformers, architecture)
    ids = {key: getattr(tokenizer, key) for key in ("eos_token_id", "pad_token_id", "bos_token_id")}
    ids = {key: value for key, value in ids.items() if value is not None and key in settings}
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**{**settings, **ids, "vocab_size": len(tokenizer)}))
    randomise(model, std=0.2 if "t5" in name else 0.3)
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder, tokenizer, model.float().eval()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_published_generator_writes_the_same_text(root: Path, name: str) -> None:
    folder, tokenizer, model = published(root, name, *GENERATORS[name])
    llm = LLM(folder, EngineConfig(**SMALL))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    tokens: dict[int, list[int]] = {place: [] for place in range(len(TEXTS))}
    for place, output in llm.stream(TEXTS, params):
        tokens[place] += output.token_ids
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    for place, (text, found) in enumerate(zip(TEXTS, llm.generate(TEXTS, params), strict=True)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            [made] = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        new = made[1:] if model.config.is_encoder_decoder else made[ids.shape[1] :]
        assert tokens[place] == new.tolist()
        expected = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if "\ufffd" not in expected:  # half a character spoils the whole run of bytes there, and only itself here
            assert found.strip() == expected.strip()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_published_encoder_gives_the_same_vectors(root: Path, name: str) -> None:
    folder, tokenizer, model = published(root, name, *ENCODERS[name])
    encoder = model.base_model
    llm = LLM(folder, EngineConfig(**SMALL))
    assert llm.tokenizer is not None
    for text, found in zip(TEXTS, llm.encode(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        if name != "roberta" and name != "xlm-roberta":  # XLNet's class token is of a segment of its own
            inputs["token_type_ids"] = torch.tensor([llm.tokenizer.encode(text).type_ids])
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state[0]
        assert np.abs(found - hidden.mean(dim=0).numpy()).max() < 1e-4
