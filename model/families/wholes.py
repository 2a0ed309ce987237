"""The models of text and images, or sounds, whose language model is served: by `model_type`.

Qwen's turn queries and keys by three positions of an image's patches, which are one and the same number in a text.
PaliGemma is not one of them: it reads its prompts in both directions.
"""

from __future__ import annotations

from triptych.model.families import gemma4_pictures, qwen_pictures, towers
from triptych.model.families.table.text_part import Whole

_LLAMA, _QWEN2, _QWEN3, _MISTRAL = Whole("llama"), Whole("qwen2"), Whole("qwen3"), Whole("mistral")
WHOLES: dict[str, Whole] = {
    "aya_vision": Whole("cohere2"),
    "cohere2_vision": Whole("cohere2"),
    "deepseek_vl": _LLAMA,
    "deepseek_vl_hybrid": _LLAMA,
    "fast_vlm": _QWEN2,
    "gemma3": Whole("gemma3_text", pictures=towers.GEMMA3),
    "gemma4": Whole("gemma4_text", scales=True, pictures=gemma4_pictures.GEMMA4),
    "gemma4_unified": Whole("gemma4_unified_text", scales=True),
    "got_ocr2": _QWEN2,
    "idefics2": _MISTRAL,
    "idefics3": Whole("llama", pictures=towers.IDEFICS3),
    "internvl": _QWEN2,
    "janus": _LLAMA,
    "lighton_ocr": _QWEN3,
    "llava": Whole("llama", pictures=towers.LLAVA),
    "llava_next": _LLAMA,
    "llava_next_video": _LLAMA,
    "llava_onevision": _QWEN2,
    "mistral3": Whole("mistral", pictures=towers.MISTRAL3),
    "ovis2": _QWEN2,
    "perception_lm": _LLAMA,
    "qwen2_5_vl": Whole("qwen2_5_vl_text", flat=True, pictures=qwen_pictures.QWEN2_5),
    "qwen2_audio": _QWEN2,
    "qwen2_vl": Whole("qwen2_vl_text", flat=True),
    "qwen3_5": Whole("qwen3_5_text", pictures=qwen_pictures.QWEN3),
    "qwen3_5_moe": Whole("qwen3_5_moe_text", pictures=qwen_pictures.QWEN3),
    "qwen3_vl": Whole("qwen3_vl_text", pictures=qwen_pictures.QWEN3),
    "qwen3_vl_moe": Whole("qwen3_vl_moe_text", pictures=qwen_pictures.QWEN3),
    "smolvlm": Whole("llama", pictures=towers.IDEFICS3),
    "video_llava": _LLAMA,
    "vipllava": _LLAMA,
    "voxtral": _LLAMA,
}
