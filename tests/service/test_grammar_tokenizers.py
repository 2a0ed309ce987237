"""Constrained output over HTTP for every way in which a folder or a file has its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.model.gguf_files import write_gguf
from tests.model.test_gguf_tokenizer import MADE
from tests.model.tokenizer_folders import write_folder
from tests.service.processes import running
from triptych.model.pretrained import CHECKPOINTS
from triptych.model.text.tokenizer import Tokenizer

TEMPLATE = """{% if tools %}{{ tools | tojson }} Answer with <tool_call> and </tool_call>.{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}"""
# vocab.json and merges.txt, SentencePiece of both kinds, with bytes for unknown characters and without, and vocab.txt.
FOLDERS = ("gpt2", "llama", "gemma", "t5", "xlm-roberta", "bert-cased")
FILES = ("gpt2", "llama-legacy", "mt5")
WHOLE = "tokenizer.json"
NAMES = (WHOLE, *FOLDERS, *(f"{name}.gguf" for name in FILES))
WORDS = "bert-cased"  # puts spaces between signs, so it writes no JSON with names
NO_BREAKS = (WORDS, "t5", "xlm-roberta", "mt5.gguf")  # have no token with a line break, which calls begin with
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 12]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def tiny_llama(vocab_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of a decoder of one layer with random weights."""
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": 16},
        **{"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True},
        **{"eos_token_id": 1, "bos_token_id": 0, "rope_theta": 10000.0, "torch_dtype": "float32"},
    }
    torch.manual_seed(0)
    attention = {f"self_attn.{name}_proj": (16, 16) for name in "qkvo"}
    layer = {**attention, **{f"mlp.{name}_proj": (16, 16) for name in ("gate", "up", "down")}}
    tensors = {f"model.layers.0.{name}.weight": torch.randn(*shape) for name, shape in layer.items()}
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = torch.ones(16)
    return config, {**tensors, "model.embed_tokens.weight": torch.randn(vocab_size, 16)}


def write_model(name: str, root: Path) -> Path:
    """Make a folder, or a GGUF file, with a tokenizer of this kind and a tiny decoder."""
    if name.endswith(".gguf"):
        return write_file(name, root)
    if name == WHOLE:
        folder = root / "whole"
        folder.mkdir()
        (folder / WHOLE).write_bytes((CHECKPOINTS / "code" / WHOLE).read_bytes())
        (folder / "tokenizer_config.json").write_text("{}")
    else:
        folder = write_folder(name, root / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None and (folder / WHOLE).exists() == (name == WHOLE)
    config, tensors = tiny_llama(tokenizer.vocab_size)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_file(name: str, root: Path) -> Path:
    kind = name.removesuffix(".gguf")
    entries = MADE[kind](write_folder(kind, root / f"source-of-{kind}"))
    _, tensors = tiny_llama(len(entries["ggml__tokens"][1]))
    settings = {
        **{"block_count": 1, "context_length": 512, "embedding_length": 16, "feed_forward_length": 16},
        **{"attention.head_count": 2, "attention.head_count_kv": 2, "rope.dimension_count": 8},
    }
    metadata: dict[str, tuple[str, Any]] = {"general.architecture": ("STRING", "llama")}
    metadata |= {f"llama.{key}": ("UINT32", value) for key, value in settings.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = ("FLOAT32", 1e-6)
    metadata |= {f"tokenizer.{key.replace('__', '.')}": entry for key, entry in entries.items()}
    metadata["tokenizer.chat_template"] = ("STRING", TEMPLATE)
    return write_gguf(root / name, metadata, {_GGUF[key.removesuffix(".weight")]: one for key, one in tensors.items()})


_GGUF = {
    **{f"model.layers.0.self_attn.{ours}_proj": f"blk.0.attn_{theirs}.weight" for ours, theirs in
       (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))},
    **{f"model.layers.0.mlp.{name}_proj": f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")},
    "model.layers.0.input_layernorm": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm.weight",
    "model.norm": "output_norm.weight",
    "model.embed_tokens": "token_embd.weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("tokenizers")
    models = [f"m{at}={write_model(name, root)}" for at, name in enumerate(NAMES)]
    options = ["--runtime", "local", "--kv-cache-memory", "4MiB", "--tool-format", "hermes"]
    with running([*options, *models]) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


def answer(client: httpx.Client, name: str, path: str, body: dict[str, Any]) -> Any:
    sent = {"model": f"m{NAMES.index(name)}", "max_tokens": 200, "temperature": 1.0, "seed": 3, **body}
    reply = client.post(path, json=sent)
    assert reply.status_code == 200, (name, reply.text)
    return reply.json()["choices"][0]


@pytest.mark.parametrize("name", NAMES)
def test_one_of_the_choices(client: httpx.Client, name: str) -> None:
    found = answer(client, name, "/generate", {"prompt": "a", "choice": ["the", "for"]})
    assert (found["text"] in ("the", "for")) and found["finish_reason"] == "stop"


@pytest.mark.parametrize("name", [name for name in NAMES if name != WORDS])
def test_json_by_a_schema_and_of_any_kind(client: httpx.Client, name: str) -> None:
    format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    found = answer(client, name, "/generate", {"prompt": "a", "response_format": format})
    assert json.loads(found["text"]).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    found = answer(client, name, "/generate", {"prompt": "a", "response_format": {"type": "json_object"}})
    assert found["text"].startswith("{") and found["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_BREAKS])
def test_calls_of_tools(client: httpx.Client, name: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = answer(client, name, "/v1/chat/completions", body)["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
