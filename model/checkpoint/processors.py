"""Finds how a folder prepares images or sound: processor_config.json's part, else preprocessor_config.json.

`transformers` 5 writes a processor's parts into processor_config.json. An image processor alone, and every older
version, writes preprocessor_config.json. An older processor_config.json has no parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.json_files import Table, Use, asked_for, read_json, table, unknown
from triptych.model.config.model import ModelConfig
from triptych.model.config.pictures import GridPositions
from triptych.model.errors import ConfigError, listed
from triptych.model.vision.pictures import MARKS, PictureProcessing, picture_processing

PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
MISSING = f"{PREPROCESSOR} and {PROCESSOR} are missing"

IMAGE_PARTS = ("image_processor",)
AUDIO_PARTS = ("feature_extractor", "audio_processor")

_NAMES = ("feature_extractor_type", "image_processor_type", "processor_class", "tokenizer_class", "auto_map")
AUDIO_SETTINGS = table(  # of WhisperFeatureExtractor
    served=("feature_size", "n_fft", "hop_length", "sampling_rate", "chunk_length"),
    refused=("dither", "padding_value"),
    unused=(
        *_NAMES,
        *("n_samples", "nb_max_frames", "mel_filters"),  # computed from the served ones
        *("padding_side", "return_attention_mask"),  # windows are full
        "do_normalize",  # an argument of a call, which the reference does not take from the file
    ),
)
IMAGE_SETTINGS = table(  # of ViTImageProcessor, and of its relatives' where they agree
    served=(
        *("size", "crop_size", "do_center_crop", "do_resize", "resample"),
        *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    ),
    refused=("do_pad", "pad_size", "crop_pct", "do_thumbnail", "do_align_long_axis", "do_flip_channel_order"),
    unused=(
        *_NAMES,
        *("do_convert_rgb", "default_to_square", "do_reduce_labels"),
        *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "image_seq_length"),
    ),
)
PICTURE_SETTINGS = {  # of the processors of models that read pictures in prompts
    **IMAGE_SETTINGS,
    **table(
        served=(
            *("patch_size", "merge_size", "min_pixels", "max_pixels"),
            *("max_image_size", "do_image_splitting", "max_soft_tokens", "pooling_kernel_size", "max_num_patches"),
        ),
        refused=("pad_size",),
        unused=(
            *("do_pad", "return_row_col_info", "background_color"),  # of a batch; here each picture is read alone
            *("temporal_patch_size", "num_frames", "fps", "video_sampling", "num_crops"),  # of films
            # Arguments of a call, which the reference takes from its own class.
            *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
            "pan_and_scan_min_ratio_to_activate",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Holds the settings of one processor and the place that they were read from, for messages."""

    settings: dict[str, Any]
    where: str


def read_processor(path: Path, parts: tuple[str, ...]) -> ProcessorSettings | None:
    """Return the settings of the first of `parts` that the folder has; None without any. Raises `ConfigError`."""
    nested = read_json(path / PROCESSOR)
    for part in parts:
        found = nested.get(part)
        if found is None:
            continue
        where = f"{PROCESSOR}: {part}"
        if not isinstance(found, dict):
            raise ConfigError(f"{path.name}: {where} must be an object, found {type(found).__name__}")
        return ProcessorSettings(found, where)
    plain = read_json(path / PREPROCESSOR)
    return ProcessorSettings(plain, PREPROCESSOR) if plain else None


def warnings_of(processor: ProcessorSettings, known: Table) -> list[str]:
    """Return a sentence on what the processor has and the table does not know; raises `ConfigError` for the refused."""
    for key in asked_for(processor.settings, known, Use.REFUSED):
        value = processor.settings[key]
        raise ConfigError(f"{processor.where}: {key} = {value!r} is not served; remove it if the model does without")
    names = unknown(processor.settings, known)
    return [f"{processor.where}: unknown settings are ignored: {listed(names)}"] if names else []


def read_images_of_any_shape(path: Path, config: ModelConfig, patch: int) -> tuple[PictureProcessing, list[str]]:
    """Return how images that keep their proportions are prepared, with warnings; raises `ConfigError`."""
    processor = read_processor(path, IMAGE_PARTS)
    if processor is None:
        missing = f"{MISSING}: images are prepared with the usual settings of {config.model_type}"
        return picture_processing({}, config.model_type, patch, 1, {}, PREPROCESSOR), [missing]
    found = picture_processing(processor.settings, config.model_type, patch, 1, {}, processor.where)
    return found, warnings_of(processor, PICTURE_SETTINGS)


def read_pictures(path: Path, config: ModelConfig) -> tuple[PictureProcessing | None, list[str]]:
    """Return how the pictures of prompts are prepared, with warnings; None where the folder does not say."""
    assert config.pictures is not None
    if (processor := read_processor(path, IMAGE_PARTS)) is None:
        return None, [f"{MISSING}: pictures are not read"]
    patches = config.pictures.patches
    spelled = {**_spelled(read_json(path / "tokenizer_config.json")), **_spelled(read_json(path / PROCESSOR))}
    warnings = warnings_of(processor, PICTURE_SETTINGS)
    settings, where = processor.settings, processor.where
    found = picture_processing(settings, config.model_type, patches.size, patches.merge, spelled, where)
    if patches.positions is GridPositions.FIXED and found.size // patches.size != patches.grid:
        side = (patches.grid or 0) * patches.size
        raise ConfigError(f"{where} makes pictures of {found.size} pixels a side, vision_config has {side}")
    longest = found.most_rows * patches.merge  # patches of a side, of a picture that is one row
    if patches.positions is GridPositions.SUMMED and patches.grid is not None and longest > patches.grid:
        raise ConfigError(f"{where} makes pictures of {longest} patches a side, vision_config has {patches.grid}")
    return found, warnings


def _spelled(settings: dict[str, Any]) -> dict[str, str]:
    """Return the tokens of pictures that a tokenizer or a processor spells in its own way."""
    parts = (settings.get(name) for name in ("extra_special_tokens", "model_specific_special_tokens"))
    found = {}
    for part in (settings, *parts):
        for name in MARKS:
            token = part.get(name) if isinstance(part, dict) else None
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                found[name] = token
    return found
