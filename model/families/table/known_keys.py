"""The keys of config.json that the configuration classes of `transformers` know, by `model_type`.

`known_keys.json` is written by `python -m tests.model.config_keys`, so that serving does not import the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("known_keys.json")


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """What one configuration class knows: keys that its model or the class reads, and other names of them."""

    defaults: Mapping[str, Any]  # None too where there is no default
    nullable: frozenset[str]  # whose value may be null; elsewhere null stands for the default
    renamed: Mapping[str, str]  # the class's key for each other name

    def has_default(self, key: str) -> bool:
        """Whether null stands for the class's default: the key has one, and its value may not be null."""
        return key not in self.nullable and self.defaults.get(key) is not None


@cache
def _file() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


@cache
def known_keys(model_type: str) -> KnownKeys | None:
    """Return the keys of the class for `model_type`; None: the library has no such class, or it is not served."""
    base, own = _file()[""], _file().get(model_type or "-")
    if own is None:
        return None
    return KnownKeys(
        defaults={**base["keys"], **own["keys"]},
        nullable=frozenset((*base["nullable"], *own.get("nullable", ()))),
        renamed=own.get("renamed", {}),
    )


# Keys that a class knows and the network of that type does not read: other networks share the class. The reference
# ignores them too.
_SOUND_AND_IMAGES = """
    adapter_kernel_size adapter_stride conv_bias conv_dim conv_kernel conv_pos_kernel_size conv_stride
    feat_extract_activation feat_extract_norm image_size num_adapter_layers num_channels num_conv_pos_embedding_groups
    num_conv_pos_embeddings num_feat_extract_layers output_hidden_size patch_size tdnn_dilation tdnn_dim tdnn_kernel
"""
_FOLDING = """
    chunk_size epsilon inf ipa_dim max_recycles num_angles num_blocks num_heads_ipa num_qk_points num_resnet_blocks
    num_transition_layers num_v_points pairwise_dim pairwise_head_width pairwise_state_dim position_bins resnet_dim
    sequence_dim sequence_head_width sequence_state_dim structure_module trans_scale_factor
"""
_IMAGES = "in_channels patch_size temporal_patch_size"
_KEYS = {
    "data2vec-text": _SOUND_AND_IMAGES,
    "esm": _FOLDING,
    "olmoe": "sliding_window",
    "qwen3_5_text": _IMAGES,
    "qwen3_5_moe_text": _IMAGES,
    # Encoder and decoder have settings of their own.
    "t5gemma": """
        head_dim hidden_activation hidden_size intermediate_size layer_types max_position_embeddings
        num_attention_heads num_hidden_layers rms_norm_eps
    """,
}
UNCOMPUTED = {model_type: frozenset(keys.split()) for model_type, keys in _KEYS.items()}
