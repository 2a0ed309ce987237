"""llama.cpp's number formats on a checkpoint of ours: written as GGUF, quantised by llama.cpp, scored.

Llama, Qwen3 and BERT are written. `gguf` is needed, and `llama-cpp-python` for what llama.cpp computes.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Container, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from triptych.model.checkpoint.json_files import read_json

FORMATS = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # by llama.cpp's numbers (enum llama_ftype)
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_BERT_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe"}  # where llama.cpp calls them otherwise


def write_gguf(folder: Path, file: Path, *, vocabulary: bool = False) -> None:
    """Write a Llama, Qwen3 (also with experts) or BERT as GGUF, tensor by tensor, matrices in their number format.

    `vocabulary`: with its tokens, if it is a Llama or BERT, so that a server can read texts.
    """
    import gguf

    raw = read_json(folder / "config.json")
    writer = gguf.GGUFWriter(file, _ARCHITECTURES.get(raw["model_type"], raw["model_type"]))
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_vocab_size(raw["vocab_size"])
    if raw["model_type"] == "bert":
        writer.add_layer_norm_eps(raw["layer_norm_eps"])
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_token_type_count(raw["type_vocab_size"])
    else:
        _add_decoder(writer, raw)
    if vocabulary:
        _add_vocabulary(writer, read_json(folder / "tokenizer.json"), raw)
    else:
        writer.add_tokenizer_model("no_vocab")
    with safe_open(folder / "model.safetensors", "pt") as stored:
        names = _together(name for name in stored.keys() if not name.startswith("pooler."))  # noqa: SIM118 (no dict)
        for name, parts in names.items():
            values, kept_as = _kept(_tensor(stored, parts), gguf.GGMLQuantizationType.BF16)
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, kept_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for parts in names.values():
            tensor = _tensor(stored, parts)
            if raw["model_type"] == "llama":
                tensor = _interleaved(parts[0], tensor, raw)
            writer.write_tensor_data(_kept(tensor, None)[0])
    writer.close()


def _add_decoder(writer: Any, raw: dict[str, Any]) -> None:
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    writer.add_head_count_kv(raw.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(raw.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    experts = raw.get("num_experts") or raw.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])


def _add_vocabulary(writer: Any, tokenizer: Any, raw: dict[str, Any]) -> None:
    """Write a WordPiece, or a BPE over SentencePiece's signs.

    Of the latter llama.cpp joins the pair with the highest score, the earliest merge's.
    """
    import gguf

    ids, special = tokenizer["model"]["vocab"], {one["content"] for one in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    if raw["model_type"] == "bert":
        _add_word_pieces(writer, tokens, special)
        return
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(tokenizer["model"]["merges"])))}
    types = [
        gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.BYTE
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1.0 - ranks.get(token, len(ranks)) for token in tokens])
    writer.add_token_types(types)
    writer.add_bos_token_id(raw["bos_token_id"])
    writer.add_eos_token_id(raw["eos_token_id"])
    writer.add_unk_token_id(0)


def _add_word_pieces(writer: Any, tokens: Sequence[str], special: Container[str]) -> None:
    """Write a WordPiece as llama.cpp reads it: the pieces that begin a word are marked, not those that go on."""
    import gguf

    def piece(token: str) -> str:
        if token in special:
            return token
        return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"

    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece(token) for token in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in tokens])
    for name, token in (("bos", "[CLS]"), ("eos", "[SEP]"), ("sep", "[SEP]"), ("unk", "[UNK]"), ("pad", "[PAD]")):
        getattr(writer, f"add_{name}_token_id")(tokens.index(token))


def _together(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF's tensors with those that are in each: one of ours, or the matrices of all experts of a layer."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        layer, _, one = name.partition(".mlp.experts.")
        whole = f"{layer}.mlp.{one.partition('.')[2]}"
        found.setdefault(_gguf_name(whole, "_exps") if one else _gguf_name(name), []).append(name)
    return found


def _tensor(stored: Any, parts: Sequence[str]) -> Tensor:
    """One stored tensor, or several as one `[experts, outputs, inputs]`; routers and BERT's positions are float32."""
    tensors = [stored.get_tensor(name) for name in parts]
    if parts[0].endswith((".mlp.gate.weight", "position_embeddings.weight", "token_type_embeddings.weight")):
        return tensors[0].float()
    return torch.stack(tensors) if ".experts." in parts[0] else tensors[0]


def _kept(values: Tensor, bfloat16: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """What a file gets of a tensor, and how it is marked: vectors are float32, bfloat16 is given as its bits."""
    if values.ndim == 1 or values.dtype is not torch.bfloat16:
        return values.float().numpy(), None
    return values.contiguous().view(torch.int16).numpy(), bfloat16


def _interleaved(name: str, values: Tensor, raw: dict[str, Any]) -> Tensor:
    """Put queries and keys in llama.cpp's order of rotation: the halves of a head become pairs."""
    heads = raw["num_attention_heads"]
    counts = {"q_proj": heads, "k_proj": raw.get("num_key_value_heads", heads)}
    count = counts.get(name.split(".")[-2])
    if count is None:
        return values
    return values.view(count, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)


def _gguf_name(name: str, suffix: str = "") -> str:
    name = name.removeprefix("model.")
    part, _, kind = name.rpartition(".")
    if name.startswith("embeddings."):
        return f"{_BERT_NAMES[part.removeprefix('embeddings.')]}.{kind}"
    if name.startswith("encoder.layer."):
        _, _, layer, rest = part.split(".", 3)
        return f"blk.{layer}.{_BERT_NAMES[rest]}.{kind}"
    if name == "lm_head.weight":
        return "output.weight"
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}{suffix}.weight"


def quantised(file: Path, out: Path, form: str) -> Path:
    """Let llama.cpp quantise a GGUF file of floats."""
    import llama_cpp

    be_quiet()
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = FORMATS[form], 2
    failed = llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(settings))
    if failed:
        raise RuntimeError(f"llama.cpp could not quantise to {form}")
    return out


@cache
def be_quiet() -> Any:
    """Say nothing on standard error; the function must stay where it is."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    return silent


class Scorer:
    """A GGUF file's model as llama.cpp computes it; close it to free it."""

    def __init__(self, file: Path, longest: int) -> None:
        """`longest` is the number of tokens of the longest text."""
        import llama_cpp

        be_quiet()
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = False  # its own buffers for AMX crashed here, with Q4_0 as with Q8_0 (0.3.36)
        self._library: Any = llama_cpp
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = longest
        context.n_threads = context.n_threads_batch = 2
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Logits after each token, `[T, V]`."""
        library, count = self._library, len(tokens)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
            batch.seq_id[at][0] = 0
        failed = library.llama_decode(self._context, batch)
        library.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama.cpp could not compute {count} tokens")
        found = np.ctypeslib.as_array(library.llama_get_logits(self._context), (count, self._vocab))
        return found.astype(np.float64)


def bits_per_byte(file: Path, start: int, texts: Sequence[tuple[str, Sequence[int]]]) -> float:
    """Compute the bits per byte of texts with their tokens, each scored alone after the token `start`."""
    scorer, nats = Scorer(file, 1 + max(len(tokens) for _, tokens in texts)), 0.0
    for _, tokens in texts:
        logits = scorer.logits([start, *tokens[:-1]])
        most = logits.max(axis=1)
        log_sums = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
        nats += float((log_sums - logits[np.arange(len(tokens)), list(tokens)]).sum())
    scorer.close()
    return nats / math.log(2) / sum(len(text.encode()) for text, _ in texts)
