"""Folders laid out as on the Hub, without safetensors and tokenizer.json, are served with the results of transformers.

Weights are random and small. File names, tensor names, tokenizer files and configurations are as published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.model.checkpoints import (
    BART,
    BERT,
    DEBERTA_V2,
    DISTILBERT,
    GEMMA,
    GPT2,
    LLAMA,
    MPNET,
    ROBERTA,
    T5,
    XLNET,
    randomise,
)
from tests.model.tokenizer_folders import write_folder, write_nllb
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import EncodeRequest, EncodeTask, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.text.tokenizer import Tokenizer

SMALL = {"kv_cache_memory": 4 << 20, "device": "cpu", "dtype": "float32"}
TEXTS = ["Attention is a weighted sum.", "Grüße aus Köln, ça va?", "for name, tensor in files:  # 你好"]
NEW_TOKENS = 12
TIED = {"tie_word_embeddings": True}

# By tokenizer folder: the class that wrote the weights, and its configuration.
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
    "byt5": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "bert-cased": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "albert": ("AlbertModel", {**BERT, "embedding_size": 12}),
    "xlnet": ("XLNetModel", XLNET),
    "camembert": ("CamembertForMaskedLM", ROBERTA),
    "mpnet": ("MPNetForMaskedLM", MPNET),
    "t5": ("T5EncoderModel", T5),  # as in GTR and Sentence-T5
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("DistilBertForSequenceClassification", {**DISTILBERT, "num_labels": 2}),  # as in SST-2 models
    "roberta": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}),  # as in cross-encoders
    "deberta-v2": ("DebertaV2ForSequenceClassification", {**DEBERTA_V2, "num_labels": 3}),
}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as root:
        yield Path(root)


def published(root: Path, name: str, architecture: str, settings: dict[str, Any]) -> tuple[Path, Any, Any]:
    """Return the folder, the reference tokenizer for it, and the model that wrote it."""
    folder = write_folder(name, root / architecture / name)
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
    model.generation_config.eos_token_id = None  # as ignore_eos does; with a minimum of tokens the library would ban it
    for place, (text, found) in enumerate(zip(TEXTS, llm.generate(TEXTS, params), strict=True)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            [made] = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
            )
        new = made[1:] if model.config.is_encoder_decoder else made[ids.shape[1] :]
        assert tokens[place] == new.tolist()
        expected = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if "\ufffd" not in expected:  # the library replaces more bytes around half a character
            assert found.strip() == expected.strip()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_published_encoder_gives_the_same_vectors(root: Path, name: str) -> None:
    folder, tokenizer, model = published(root, name, *ENCODERS[name])
    encoder = model.base_model
    llm = LLM(folder, EngineConfig(**SMALL))
    assert llm.tokenizer is not None
    for text, found in zip(TEXTS, llm.encode(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        if name in ("bert", "bert-cased", "albert", "xlnet"):  # XLNet gives its class token its own segment
            inputs["token_type_ids"] = torch.tensor([llm.tokenizer.encode(text).type_ids])
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state[0]
        assert np.abs(found - hidden.mean(dim=0).numpy()).max() < 1e-4


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_published_classifier_gives_the_same_scores(root: Path, name: str) -> None:
    folder, tokenizer, model = published(root, name, *CLASSIFIERS[name])
    loaded = LLM(folder, EngineConfig(**SMALL))
    assert loaded.tokenizer is not None
    pair = None if name == "distilbert" else "A cross-encoder reads two texts."
    for place, text in enumerate(TEXTS):
        inputs = tokenizer(text, pair, return_tensors="pt")
        encoded = loaded.tokenizer.encode(text, pair)
        assert list(encoded.ids) == inputs.input_ids[0].tolist()
        loaded._encode.add(EncodeRequest(str(place), name, token_source(encoded.ids), EncodeTask.LOGITS))
        with torch.no_grad():
            inputs["token_type_ids"] = torch.zeros_like(inputs.input_ids)
            if name == "distilbert":
                del inputs["token_type_ids"]
            expected = model(**inputs).logits[0].numpy()
        [output], _ = loaded._encode.step()
        assert np.abs(np.frombuffer(output.data, np.float32) - expected).max() < 1e-4


def test_a_published_nllb_in_shards_writes_the_same_tokens(tmp_path: Path) -> None:
    """Compare the ids after the tokenizer: without tokenizer.json the library gives the languages other ids."""
    folder = write_nllb(tmp_path / "nllb")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None and tokenizer.source_languages is not None
    settings = {**BART, **TIED, "activation_function": "relu", "vocab_size": tokenizer.vocab_size}
    torch.manual_seed(4)
    model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**settings))
    randomise(model, std=0.3)
    model.config.architectures = ["M2M100ForConditionalGeneration"]
    model.config.save_pretrained(folder)
    state = list(model.state_dict().items())
    shards = {f"pytorch_model-0000{at + 1}-of-00003.bin": dict(state[at::3]) for at in range(3)}
    for file, tensors in shards.items():
        torch.save(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    loaded, start = LLM(folder, EngineConfig(**SMALL)), model.config.decoder_start_token_id
    model.float().eval()
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    text = "Grüße aus Köln"
    model.generation_config.eos_token_id = None
    ours, languages = tokenizer.encode(text).ids, tokenizer.source_languages
    for source, target in (("fra_Latn", "ace_Arab"), ("ace_Arab", None), (None, "fra_Latn")):
        ids = ours if source is None else languages.mark(ours, languages.tokens[source])
        outputs = loaded.stream([text], params, source_language=source, target_language=target)
        tokens = [token for _, output in outputs for token in output.token_ids]
        forced = {} if target is None else {"decoder_input_ids": torch.tensor([[start, languages.tokens[target]]])}
        with torch.no_grad():
            [made] = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, **forced)
        assert tokens == made[1 if target is None else 2 :].tolist()
    for arguments, message in (
        ({"source_language": "xx"}, "source_language: nllb has no language 'xx'"),
        ({"target_language": "</s>"}, "target_language: nllb has no language token '</s>'"),
        ({"target_language": "xx"}, "target_language: nllb has no language token 'xx'"),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded.generate([text], params, **arguments)
    with pytest.raises(ConfigError, match="source_language: token ids are taken as they are"):
        loaded.generate([[5]], params, source_language="fra_Latn")


_INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_LAST, _MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode_mean_tokens": True}
# As published: tokenizer, class, configuration, pooling, prompts, and widths of Dense modules.
EMBEDDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, str], tuple[int, ...]]] = {
    "e5-mistral": (
        *("llama-legacy", "MistralModel", {**LLAMA, "sliding_window": 16}, _LAST),
        *({"web_search_query": _INSTRUCTION + " "}, ()),
    ),
    "qwen3-embedding": (
        *("llama-legacy", "Qwen3Model", {**LLAMA, **TIED, "head_dim": 12}, _LAST),
        *({"query": _INSTRUCTION, "document": ""}, ()),
    ),
    "embedding-gemma": (
        *("gemma", "Gemma3TextModel", {**GEMMA, "num_hidden_layers": 6, "use_bidirectional_attention": True}, _MEAN),
        *({"query": "task: search result | query: ", "document": "title: none | text: "}, (48, 32)),
    ),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_published_embedder_made_of_a_decoder_gives_the_same_vectors(tmp_path: Path, name: str) -> None:
    kind, architecture, settings, pooling, prompts, widths = EMBEDDERS[name]
    folder, tokenizer, model = published(tmp_path, kind, architecture, settings)
    if name == "qwen3-embedding":  # stored as a language model without the tensor prefix
        model.config.architectures = ["Qwen3ForCausalLM"]
        model.config.save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *("Dense",) * len(widths), "Normalize"]
    paths = ["", *(f"{at}_{one}" for at, one in enumerate(kinds) if at)]
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{one}"}
        for at, (one, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    files: dict[str, Any] = {"modules": listed, "config_sentence_transformers": {"prompts": prompts}}
    files["1_Pooling/config"] = {"word_embedding_dimension": 32, **pooling, "include_prompt": True}
    inputs, matrices = 32, []
    for path, outputs in zip(paths[2:], widths, strict=False):
        identity = "torch.nn.modules.linear.Identity"
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}
        files[f"{path}/config"], inputs = sizes, outputs
        matrices.append(torch.randn(outputs, sizes["in_features"]))
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / f"{path}.json").write_text(json.dumps(content))
    for path, matrix in zip(paths[2:], matrices, strict=False):
        save_file({"linear.weight": matrix}, folder / path / "model.safetensors")
    llm = LLM(folder, EngineConfig(**SMALL))
    assert not llm.checkpoint.config.can_generate
    for prompt in [None, *prompts]:
        for text, found in zip(TEXTS, llm.encode(TEXTS, prompt), strict=True):
            ids = tokenizer((prompts[prompt] if prompt else "") + text, return_tensors="pt").input_ids
            with torch.no_grad():
                hidden = model(input_ids=ids).last_hidden_state[0]
            vector = hidden[-1] if pooling is _LAST else hidden.mean(dim=0)
            for matrix in matrices:
                vector = matrix @ vector
            assert np.abs(found - torch.nn.functional.normalize(vector, dim=0).numpy()).max() < 1e-4
