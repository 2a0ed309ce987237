"""Tiny random models that read pictures in prompts, with the pictures and prompts that tests send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.model.decoder_rows import RECURRENT, SIZES, VOCAB, random_model
from triptych.model.api.request import ImageSpan, Source, image_source

IMAGE = 0  # the token at each place of a picture; no random prompt has it
_TOKENS = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
_ROPE = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75, mrope_section=[2, 2, 2])
QWEN: dict[str, Any] = dict(
    text_config=dict(RECURRENT, max_position_embeddings=512, rope_parameters=dict(_ROPE, mrope_interleaved=True)),
    vision_config=dict(
        **dict(depth=3, hidden_size=24, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=32),
        **dict(spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=36),
    ),
    **_TOKENS,
)
_AREA = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2)
_AREA |= dict(size=dict(shortest_edge=256, longest_edge=4096), image_mean=[0.5] * 3, image_std=[0.25] * 3)

# Of all kinds 8 pixels a side are a place of the prompt.
_TEXT: dict[str, Any] = dict(**SIZES, num_key_value_heads=2, head_dim=8, max_position_embeddings=512)
_TEXT |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)
_ENCODER: dict[str, Any] = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2)


def _whole(architecture: str, text: str, tower: str, **changes: Any) -> Callable[[], Any]:
    """Return a maker of a random model with a tower of `changes["vision"]`; `changes["decoder"]` is of its decoder."""
    vision = {"model_type": tower, **_ENCODER, **changes.pop("vision")}
    own = dict(_TEXT, model_type=text, **changes.pop("decoder", {}))
    settings = dict(text_config=own, vision_config=vision, image_token_id=IMAGE)
    return random_model(architecture, settings, **changes)


_SQUARE = dict(image_size=32, patch_size=8)
_HALVES = dict(image_mean=[0.5] * 3, image_std=[0.25] * 3)
_FIXED = dict(
    **_HALVES, size=dict(height=32, width=32), do_center_crop=False, image_processor_type="CLIPImageProcessor"
)
_TILES = dict(**_HALVES, size=dict(longest_edge=72), max_image_size=dict(longest_edge=24))
_LLAVA, _IDEFICS = "LlavaForConditionalGeneration", dict(vision=dict(image_size=32, patch_size=4), scale_factor=2)
_LONGEST = dict(**_HALVES, image_processor_type="PixtralImageProcessor", size=dict(longest_edge=64))

PICTURE_MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-5-pictures": random_model("Qwen3_5ForConditionalGeneration", QWEN),
    "llava": _whole(_LLAVA, "llama", "clip_vision_model", vision=_SQUARE),
    "llava-siglip": _whole(
        *(_LLAVA, "qwen2", "siglip_vision_model"),
        vision=_SQUARE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    ),
    "llava-pixtral": _whole(
        *(_LLAVA, "mistral", "pixtral"),
        vision=dict(image_size=64, patch_size=8, head_dim=12),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "mistral3": _whole(
        *("Mistral3ForConditionalGeneration", "mistral", "pixtral"), vision=dict(image_size=64, patch_size=4)
    ),
    "idefics3": _whole("Idefics3ForConditionalGeneration", "llama", "idefics3_vision", **_IDEFICS),
    "smolvlm": _whole("SmolVLMForConditionalGeneration", "llama", "smolvlm_vision", **_IDEFICS),
    "gemma3-pictures": _whole(
        *("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model"),
        vision=dict(image_size=32, patch_size=4),
        # A window shorter than a picture.
        decoder=dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9, query_pre_attn_scalar=8),
        mm_tokens_per_image=16,
    ),
}
_VISION = dict(depth=3, hidden_size=24, intermediate_size=40, num_heads=2, patch_size=4, out_hidden_size=32)
_VISION |= dict(spatial_merge_size=2, temporal_patch_size=2)
_SECTIONS = dict(rope_type="default", rope_theta=500.0, mrope_section=[1, 2, 1])
PICTURE_MODELS |= {
    "qwen2-5-vl-pictures": random_model(
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            text_config=dict(_TEXT, rope_parameters=_SECTIONS),
            vision_config=dict(_VISION, window_size=16, fullatt_block_indexes=[1]),
            **_TOKENS,
        ),
    ),
    "qwen3-vl-pictures": random_model(
        "Qwen3VLForConditionalGeneration",
        dict(
            text_config=dict(_TEXT, num_hidden_layers=3, rope_parameters=dict(_SECTIONS, mrope_interleaved=True)),
            vision_config=dict(_VISION, num_position_embeddings=25, deepstack_visual_indexes=[0, 2]),
            **_TOKENS,
        ),
    ),
}
# Layers that share keys and have vectors of each token; a window shorter than a picture.
_GEMMA4: dict[str, Any] = dict(num_hidden_layers=6, sliding_window=9, final_logit_softcapping=3.0, rms_norm_eps=3e-2)
_GEMMA4 |= dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, global_head_dim=12)
_SMALL = dict(hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3)
_LARGE = dict(attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision")
_LARGE |= dict(hidden_size_per_layer_input=0)


def _gemma4(vision: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    """Return a maker of a Gemma 4 like its published sizes, with random numbers in its buffers."""
    own = dict(num_key_value_heads=1, head_dim=12, patch_size=4, pooling_kernel_size=2, position_embedding_size=140)
    maker = _whole(
        *("Gemma4ForConditionalGeneration", "gemma4_text", "gemma4_vision"),
        vision=dict(own, **vision),
        decoder=dict(_GEMMA4, **changes),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )

    def make() -> Any:
        model = maker()
        randomise_buffers(model)
        return model

    return make


def randomise_buffers(model: Any) -> None:
    """Give the stored buffers of a Gemma 4 random numbers; its bounds then cut some of what they bound."""
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "std_scale", "std_bias", "_max")):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("_min"):
            buffer.uniform_(-1.5, -0.5)
    for module in model.modules():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if hasattr(read := getattr(module, first, None), "input_min"):
                for one in others:  # parts of a matrix read within the same bounds, so that C computes it
                    getattr(module, one).input_min.copy_(read.input_min)
                    getattr(module, one).input_max.copy_(read.input_max)


PICTURE_MODELS |= {
    "gemma4-pictures": _gemma4(dict(use_clipped_linears=True), use_double_wide_mlp=True, **_SMALL),
    "gemma4-dense-pictures": _gemma4(dict(standardize=True), **_LARGE),
    "gemma4-experts-pictures": _gemma4(
        {}, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=20, **_LARGE
    ),
}
_BUDGET = dict(image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
_BUDGET |= dict(do_normalize=True, **_HALVES)
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3-5-pictures": _AREA,
    "llava": _FIXED,
    "llava-siglip": _FIXED,
    "llava-pixtral": dict(**_LONGEST, patch_size=8),
    "mistral3": dict(**_LONGEST, patch_size=4),
    "idefics3": dict(**_TILES, image_processor_type="Idefics3ImageProcessor"),
    "smolvlm": dict(**_TILES, image_processor_type="SmolVLMImageProcessor"),
    "gemma3-pictures": _FIXED,
    "qwen2-5-vl-pictures": _AREA,
    "qwen3-vl-pictures": _AREA,
    **dict.fromkeys(("gemma4-pictures", "gemma4-dense-pictures", "gemma4-experts-pictures"), _BUDGET),
}
# The pixels of the pictures that a kind reads, where not any.
SQUARES = {"llava": 32, "llava-siglip": 32, "gemma3-pictures": 32, "idefics3": 24, "smolvlm": 24}


def write_processor(kind: str, folder: Path) -> None:
    """Write how the pictures of a kind are prepared into its folder, if it reads any."""
    if kind in PROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))


def picture(height: int, width: int, seed: int = 0, cell: int = 8) -> Source:
    """Return a random picture; a square of `cell` pixels a side is a row of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    return image_source(pixels.numpy().tobytes(), (3, height, width), height * width // cell**2)


def with_pictures(
    parts: Sequence[Sequence[int] | Source], row_end: int | None = None, token: int = IMAGE, cell: int = 8
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return a prompt of texts and pictures, and where these are.

    `row_end` is after each row of a picture; `token` is at each place of it, a square of `cell` pixels a side.
    """
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, Source):
            length = 0 if row_end is None else part.shape[2] // cell
            spans.append(ImageSpan(len(ids), part, length))
            row = [token] * length + [-1 if row_end is None else row_end]
            ids += row * (part.num_positions // length) if length else [token] * part.num_positions
        else:
            ids += part
    return tuple(ids), tuple(spans)


def pictures_for_reference(kind: str, spans: Sequence[ImageSpan], ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the pictures as the `transformers` model of a kind takes them."""
    sources = [span.source for span in spans]
    pixels = [torch.frombuffer(bytearray(one.features), dtype=torch.uint8).view(one.shape) for one in sources]
    scaled = [(one / 255 - 0.5) / 0.25 for one in pixels]
    given = pixels_for_reference(kind, scaled)
    if kind.startswith(("qwen", "gemma")):
        kinds = torch.tensor([[int(token == IMAGE) for token in ids]], dtype=torch.int32)
        given["token_type_ids" if kind.startswith("gemma3") else "mm_token_type_ids"] = kinds
    return given


def pixels_for_reference(kind: str, pictures: Sequence[Tensor], patch: int = 4, merge: int = 2) -> dict[str, Tensor]:
    """Return normalised pictures `[3, H, W]` as the `transformers` model of a kind takes them."""
    if kind.startswith("qwen"):
        patches, grids, side = [], [], patch * merge
        for one in pictures:
            _, height, width = one.shape
            cut = one.reshape(3, height // side, merge, patch, width // side, merge, patch)
            cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, 2, -1, -1)
            patches.append(cut.reshape(height * width // patch**2, -1))
            grids.append([1, height // patch, width // patch])
        return dict(pixel_values=torch.cat(patches), image_grid_thw=torch.tensor(grids))
    if kind.startswith("gemma4"):
        return _patches_of_gemma4(pictures, patch)
    sizes = torch.tensor([one.shape[1:] for one in pictures])
    height, width = sizes.max(dim=0).values.tolist()
    padded = [functional.pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in pictures]
    values = torch.stack(padded)
    if kind in ("idefics3", "smolvlm"):
        return dict(pixel_values=values[None])
    return dict(pixel_values=values) | (dict(image_sizes=sizes) if kind in ("mistral3", "llava-pixtral") else {})


def _patches_of_gemma4(pictures: Sequence[Tensor], patch: int) -> dict[str, Tensor]:
    """Return the patches of pictures row by row, each with its column and row, filled up to the largest picture's."""
    patches, places = [], []
    for one in pictures:
        rows, columns = one.shape[1] // patch, one.shape[2] // patch
        cut = one.reshape(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        patches.append(cut.reshape(rows * columns, -1))
        places.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2).flip(1))
    return dict(
        pixel_values=nn.utils.rnn.pad_sequence(patches, batch_first=True),
        image_position_ids=nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1),
    )
