"""The benchmark models: published shapes, random weights from a fixed seed, and tokenizers trained when built.

They are written once, as Hugging Face checkpoint folders.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lab.bench import vocabularies
from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.weight_files import tensor_names
from triptych.model.config.model import ModelConfig
from triptych.model.families import family_of
from triptych.model.families.table.raw_config import Settings
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.build import build_model
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import stored_tensors

_VERSION = 2  # of the folders; others are rebuilt
_STD = 0.02

CONFIGS: dict[str, dict[str, Any]] = {
    "D1": {  # GPT-2 small
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "D2": {  # a small grouped-query decoder
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "D2S": {  # a tenth of D2, of its vocabulary: its draft model
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "D3": {  # Llama 3.2 1B's shape
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "D4": {  # Qwen3 4B's shape
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 151643,
    },
    "M1": {  # Qwen3-MoE's kind: 1 billion parameters; a token passes through 185 million
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 31999,
    },
    "R1": {  # Qwen3.5's kind: half a billion parameters, three recurrent layers to one of attention
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 31999,
    },
    "E1": {  # T5-small
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "E2": {  # BART-base
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": 50265,
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 2,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
    "S1": {  # Whisper small
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "d_model": 768,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 50258,
        "bos_token_id": 50257,
        "pad_token_id": 50257,
        "eos_token_id": 50257,
    },
    "N1": {  # all-MiniLM-L6-v2's shape
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    },
    "N2": {  # BERT-base
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    },
    "N3": {  # ModernBERT-base
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "cls_token_id": 50281,
        "sep_token_id": 50282,
        "pad_token_id": 50283,
    },
    "N4": {  # mpnet-base
        "model_type": "mpnet",
        "architectures": ["MPNetModel"],
        "vocab_size": 30527,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 514,
        "relative_attention_num_buckets": 32,
        "layer_norm_eps": 1e-5,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
}
# Two towers that compare pictures with texts: CLIP ViT-B/32, and SigLIP base of 224 pixels in patches of 16.
_TEXT_TOWER = {"num_hidden_layers": 12, "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 1}
_GREY = [0.5, 0.5, 0.5]  # so that pixels are between -1 and 1 (`pixel_values`)
_PICTURE_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
CONFIGS["V1"] = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 512,
    "text_config": {
        **_TEXT_TOWER,
        "model_type": "clip_text_model",
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
    },
    "vision_config": {**_PICTURE_TOWER, "model_type": "clip_vision_model", "patch_size": 32},
}
CONFIGS["V2"] = {
    "model_type": "siglip",
    "architectures": ["SiglipModel"],
    "text_config": {
        **_TEXT_TOWER,
        "model_type": "siglip_text_model",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "vision_config": {
        **_PICTURE_TOWER,
        "model_type": "siglip_vision_model",
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
LARGE = ("D3", "D4", "M1", "R1")  # whose weights are drawn in bfloat16: two copies in float32 would not fit
CONFIGS["N5"] = {**CONFIGS["N3"], "global_attn_every_n_layers": 1}  # without windows, to see what they are worth


def config_of(raw: dict[str, Any]) -> ModelConfig:
    """The network that a raw config.json describes."""
    return family_of(raw).config(Settings(raw), None)


def random_model(
    raw: dict[str, Any],
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    target: torch.device | None = None,
) -> Transformer:
    """Return the network of a raw config.json, with random weights from a fixed seed.

    It is made on `device`; if it is to compute on another one, that is `target`: products of experts depend on it.
    """
    factory = LinearFactory(device=device if target is None else target)
    model = build_model(config_of(raw), backend, factory).to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, _STD, generator=generator)
    return model.requires_grad_(False).eval()


def built(name: str, cache: Path) -> Path:
    """Return the folder of benchmark model `name` in `cache`, which is written if missing."""
    folder = cache / f"{name}-{_VERSION}"
    if folder.exists():
        return folder
    dtype = torch.bfloat16 if name in LARGE else torch.float32
    model = random_model(CONFIGS[name], SdpaBackend(), dtype, torch.device("cpu"))
    making = cache / f".{name}-{os.getpid()}"
    making.mkdir(parents=True)
    tensors = {key: tensor.to(torch.bfloat16).contiguous() for key, tensor in stored_tensors(model)}
    save_file(tensors, making / "model.safetensors", metadata={"format": "pt"})
    if "vision_config" in CONFIGS[name]:
        (making / "preprocessor_config.json").write_text(json.dumps({"image_mean": _GREY, "image_std": _GREY}))
    (making / "config.json").write_text(json.dumps({**CONFIGS[name], "torch_dtype": "bfloat16"}, indent=1))
    assert tensor_names([making / "model.safetensors"])[0]
    vocabularies.trained(CONFIGS[name], vocabularies.training_texts()).save(str(making / "tokenizer.json"))
    try:
        making.rename(folder)
    except OSError:  # another process has written it
        shutil.rmtree(making)
    return folder
