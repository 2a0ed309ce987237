"""Benchmark models of small shapes, whose tokenizers are trained on a short text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lab.bench import models, vocabularies
from lab.training.corpus import held_out_sample

SMALL: dict[str, dict[str, Any]] = {  # shapes, and vocabularies of twice what the short text yields
    "D1": {"vocab_size": 4000, "bos_token_id": 3999, "eos_token_id": 3999, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "D2": {
        "vocab_size": 4000,
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "E1": {
        "vocab_size": 2128,
        **{"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2},
    },
    "E2": {
        "vocab_size": 4000,
        **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    },
    "N1": {
        "vocab_size": 3000,
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    },
    "N3": {
        **{"vocab_size": 4000, "cls_token_id": 3991, "sep_token_id": 3992, "pad_token_id": 3993},
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    },
    "N4": {
        "vocab_size": 3000,
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    },
}
TOWERS: dict[str, dict[str, Any]] = {
    name: {
        part: {
            **models.CONFIGS[name][part],
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            **({"vocab_size": 4000, "bos_token_id": 3998, "eos_token_id": 3999} if part == "text_config" else {}),
        }
        for part in ("text_config", "vision_config")
    }
    for name in ("V1", "V2")
}


@contextmanager
def small_models() -> Iterator[None]:
    """`models.built` writes these until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            models, "CONFIGS", {name: {**models.CONFIGS[name], **own} for name, own in (SMALL | TOWERS).items()}
        )
        patch.setattr(vocabularies, "training_texts", lambda: [held_out_sample()])
        yield
