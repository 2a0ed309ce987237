"""Keys that a configuration class of the reference knows and the network of that type does not read.

They stand in the class because other networks share it: those of sound and images, of folding proteins, of attention
that has another kernel. Such keys are ignored, as the reference ignores them.
"""

from __future__ import annotations

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
