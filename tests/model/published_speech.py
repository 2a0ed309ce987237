"""Published speech models.

Their keys have no bias; our layers have zeros there: one bias in an encoder layer, two in a decoder layer.
"""

from __future__ import annotations

import json

from tests.model.published import Published


def _whisper(size: int, layers: int, decoder_layers: int | None = None, **changes: object) -> str:
    """Return a config.json like those of the `openai` folders."""
    below = layers if decoder_layers is None else decoder_layers
    base = json.loads(
        """{"activation_dropout": 0.0, "activation_function": "gelu", "apply_spec_augment": false,
        "architectures": ["WhisperForConditionalGeneration"], "attention_dropout": 0.0,
        "begin_suppress_tokens": [220, 50257], "bos_token_id": 50257, "classifier_proj_size": 256,
        "decoder_layerdrop": 0.0, "decoder_start_token_id": 50258, "dropout": 0.0, "encoder_layerdrop": 0.0,
        "eos_token_id": 50257, "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]], "init_std": 0.02,
        "is_encoder_decoder": true, "mask_feature_length": 10, "mask_feature_min_masks": 0, "mask_feature_prob": 0.0,
        "mask_time_length": 10, "mask_time_min_masks": 2, "mask_time_prob": 0.05, "max_length": 448,
        "max_source_positions": 1500, "max_target_positions": 448, "median_filter_width": 7, "model_type": "whisper",
        "num_mel_bins": 80, "pad_token_id": 50257, "scale_embedding": false, "suppress_tokens": [1, 2, 7, 8, 9],
        "torch_dtype": "float32", "use_cache": true, "use_weighted_layer_sum": false, "vocab_size": 51865}"""
    )
    heads = size // 64
    base |= dict(d_model=size, encoder_layers=layers, decoder_layers=below, num_hidden_layers=layers)
    base |= dict(encoder_attention_heads=heads, decoder_attention_heads=heads)
    base |= dict(encoder_ffn_dim=4 * size, decoder_ffn_dim=4 * size)
    return json.dumps(base | changes)


_LARGE_V3 = dict(
    num_mel_bins=128,
    vocab_size=51866,
    torch_dtype="float16",
    suppress_tokens=None,
    begin_suppress_tokens=[220, 50256],
)
PUBLISHED_SPEECH = {
    "whisper-tiny": Published(37_760_640, _whisper(384, 4), -12 * 384),
    "whisper-small": Published(241_734_912, _whisper(768, 12), -36 * 768),
    "whisper-large-v3": Published(1_543_490_560, _whisper(1280, 32, **_LARGE_V3), -96 * 1280),
    "whisper-large-v3-turbo": Published(808_878_080, _whisper(1280, 32, 4, **_LARGE_V3), -40 * 1280),
    "distil-large-v3": Published(756_405_760, _whisper(1280, 32, 2, **_LARGE_V3, max_length=448), -36 * 1280),
}
