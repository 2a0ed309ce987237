"""GGUF's encoders and encoder-decoders: BERT, Nomic's BERT, ModernBERT, T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.model.checkpoint.gguf import family_settings
from triptych.model.checkpoint.gguf.metadata import refuse_other
from triptych.model.checkpoint.gguf.table import SIZES, Architecture, Rope, layers
from triptych.model.gguf.container import GGUFModel

_BERT_KEYS = {**SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
_BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **layers(
        "encoder.layer.{}",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
}
_NOMIC_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    **layers(
        "encoder.layers.{}",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
    ),
}


_MODERNBERT_NAMES = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    **layers(
        "layers.{}",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "attn_norm": "attn_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
            "ffn_norm": "mlp_norm",
        },
    ),
}


def _modernbert(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without a window every layer has full attention."""
    refuse_other(model, f"{model.architecture}.rope.scaling.type", "none")
    every_layer = {"layer_types": ["full_attention"] * raw["num_hidden_layers"], "local_attention": 2}
    return {} if raw.get("local_attention") else every_layer


def _t5_stack(side: str, short: str) -> dict[str, str]:
    block = f"{side}.block.{{}}.layer"
    last = 2 if side == "decoder" else 1
    dense = f"{last}.DenseReluDense"
    names = {f"attn_{part}": f"0.SelfAttention.{part}" for part in "qkv"}
    names |= {"attn_o": "0.SelfAttention.o", "attn_rel_b": "0.SelfAttention.relative_attention_bias"}
    names |= {"attn_norm": "0.layer_norm", "ffn_norm": f"{last}.layer_norm", "ffn_down": f"{dense}.wo"}
    names |= {"ffn_gate": f"{dense}.wi_0", "ffn_up": f"{dense}.wi_1"}
    if side == "decoder":
        names |= {f"cross_attn_{part}": f"1.EncDecAttention.{part}" for part in "qkvo"}
        names |= {"cross_attn_norm": "1.layer_norm"}
    return {
        **layers(block, names, f"{short}.blk"),
        f"{short}.output_norm": f"{side}.final_layer_norm",
    }


_T5_KEYS = {
    "embedding_length": "d_model",
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}
_T5_NAMES = {
    "token_embd": "shared",
    "output": "lm_head",
    **_t5_stack("encoder", "enc"),
    **_t5_stack("decoder", "dec"),
}
_T5_KNOWN = ("context_length", "attention.layer_norm_epsilon", "attention.head_count_kv")

ENCODERS = {
    "bert": Architecture(
        "bert",
        _BERT_KEYS,
        _BERT_NAMES,
        known=("attention.head_count_kv",),
        encoder=True,
        more=family_settings.segments,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        {**_BERT_KEYS, "attention.key_length": "head_dim"},
        _NOMIC_NAMES,
        {"hidden_act": "silu"},
        known=("attention.head_count_kv",),
        rope=Rope.PLAIN,
        rope_theta=1000.0,
        encoder=True,
        more=family_settings.segments,
    ),
    "modern-bert": Architecture(
        "modernbert",
        {
            **{**SIZES, "attention.layer_norm_epsilon": "norm_eps", "attention.sliding_window": "local_attention"},
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "hidden_activation": "hidden_activation",
        },
        _MODERNBERT_NAMES,
        known=("attention.layer_norm_rms_epsilon", "rope.freq_base_swa", "classifier.pooling_type"),
        rope=Rope.BY_TYPE,
        rope_theta=160_000.0,
        encoder=True,
        more=_modernbert,
    ),
    "t5": Architecture(
        "t5",
        _T5_KEYS,
        _T5_NAMES,
        {"relative_attention_max_distance": 128},
        known=_T5_KNOWN,
        encoder=True,
        head_of_table=False,
        more=family_settings.t5,
    ),
    "t5encoder": Architecture(
        "t5",
        _T5_KEYS,
        _T5_NAMES,
        {"relative_attention_max_distance": 128, "architectures": ["T5EncoderModel"]},
        known=_T5_KNOWN,
        encoder=True,
        head_of_table=False,
        more=family_settings.t5,
    ),
}
