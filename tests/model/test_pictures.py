"""Pictures of prompts: pixels and texts equal those of the processors of `transformers`, over odd sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tests.model.test_images import file, picture
from triptych.model.checkpoint.processors import read_pictures
from triptych.model.config.pictures import PatchConfig
from triptych.model.errors import ConfigError
from triptych.model.vision.decoding import ImageError
from triptych.model.vision.pictures import PictureProcessing, PreparedPicture, image_spans, picture_processing

WHERE = "preprocessor_config.json"
SIZES = [(1, 1), (37, 211), (224, 224), (333, 250), (611, 60), (200, 461), (7, 130)]


def blocks(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches of `[3, H, W]` in blocks."""
    side, down, across = patch * merge, pixels.shape[1] // (patch * merge), pixels.shape[2] // (patch * merge)
    cut = pixels[:, : down * side, : across * side].reshape(3, down, merge, patch, across, merge, patch)
    return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(down * across * merge**2, -1)


def normalised(made: PictureProcessing, found: PreparedPicture) -> np.ndarray:
    """Return the pixels of all parts, `[P, 3, H, W]`."""
    pixels = np.stack([np.frombuffer(part, np.uint8) for part in found.parts]).reshape(-1, *found.shape)
    return pixels * np.array(made.scale)[:, None, None] + np.array(made.shift)[:, None, None]


# Type of model, class of processor, its settings, patch and merge of the model.
CASES: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "llava": ("llava", "CLIP", {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}, 14, 1),
    "llava siglip": ("llava", "Siglip", {"size": {"height": 45, "width": 45}}, 14, 1),
    "gemma3": ("gemma3", "Gemma3", {"size": {"height": 56, "width": 56}}, 7, 2),
    "gemma4": ("gemma4", "Gemma4", {"max_soft_tokens": 70, "patch_size": 8, "pooling_kernel_size": 2}, 8, 2),
    "gemma4 default": ("gemma4", "Gemma4", {}, 16, 3),
    "gemma4 normalised": ("gemma4", "Gemma4", {"do_normalize": True}, 16, 3),
    "siglip2": ("siglip2", "Siglip2", {"patch_size": 8, "max_num_patches": 50}, 8, 1),
    "siglip2 default": ("siglip2", "Siglip2", {}, 16, 1),
    "qwen": ("qwen3_5", "Qwen2VL", {"patch_size": 16}, 16, 2),
    "qwen bounds": (
        "qwen3_vl",
        "Qwen2VL",
        {"size": {"shortest_edge": 4096, "longest_edge": 16384}, "patch_size": 8, "image_mean": [0.5] * 3},
        8,
        2,
    ),
    "qwen older": ("qwen2_5_vl", "Qwen2VL", {"min_pixels": 3136, "max_pixels": 30000}, 14, 2),
    "pixtral": ("mistral3", "Pixtral", {"size": {"longest_edge": 100}, "patch_size": 28}, 14, 2),
    "pixtral of llava": ("llava", "Pixtral", {"patch_size": {"height": 16, "width": 16}}, 16, 1),
    "smolvlm": (
        "smolvlm",
        "SmolVLM",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
        8,
        2,
    ),
    "idefics3": (
        "idefics3",
        "Idefics3",
        {"size": {"longest_edge": 75}, "max_image_size": {"longest_edge": 48}},
        8,
        3,
    ),
    "llava null": (
        "llava",
        "CLIP",
        {"size": {"height": 42, "width": 42}, "do_center_crop": None, "do_normalize": None},
        14,
        1,
    ),
    "gemma3 crop": ("gemma3", "Gemma3", {"size": 56, "do_center_crop": True, "crop_size": 42}, 7, 2),
    "idefics3 null": (
        "idefics3",
        "Idefics3",
        {"max_image_size": {"longest_edge": 48}, "size": {"longest_edge": 96}, "do_image_splitting": None},
        8,
        3,
    ),
    "idefics3 whole": (
        "idefics3",
        "Idefics3",
        {"max_image_size": {"longest_edge": 48}, "do_image_splitting": False},
        8,
        3,
    ),
}


def processed(kind: str, settings: dict[str, Any], data: bytes, patch: int, merge: int) -> tuple[np.ndarray, Any]:
    """Return the patches of `transformers` in our order, and all that its processor returned."""
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    extra = {"return_row_col_info": True} if kind in ("Idefics3", "SmolVLM") else {}
    image = Image.open(BytesIO(data)).convert("RGB")
    found = processor([[image]] if extra else [image], return_tensors="np", **extra)
    values = found["pixel_values"]
    if kind == "Qwen2VL":  # channels, two equal frames, pixels
        frames = values.reshape(len(values), 3, 2, patch, patch)
        np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])
        return frames[:, :, 0].reshape(len(values), -1), found
    if kind == "Gemma4":
        return _blocks_by_place(values[0], found["image_position_ids"][0], patch, merge), found
    if kind == "Siglip2":
        rows, columns = found["spatial_shapes"][0].tolist()
        places = np.stack([one.flatten() for one in np.indices((rows, columns))[::-1]], axis=1)
        return _blocks_by_place(values[0][: rows * columns], places, patch, merge), found
    tiles = values[0] if extra else values
    return np.concatenate([blocks(tile, patch, merge) for tile in tiles]), found


def _blocks_by_place(patches: np.ndarray, places: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches, which have all channels of a pixel together and their columns and rows, in blocks."""
    used = places[:, 0] >= 0
    columns, rows = (places[used].max(axis=0) + 1).tolist()
    cut = patches[used].reshape(rows, columns, patch, patch, 3).transpose(4, 0, 2, 1, 3)
    return blocks(cut.reshape(3, rows * patch, columns * patch), patch, merge)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_prompts_picture_is_that_of_transformers(case: str, size: tuple[int, int]) -> None:
    model_type, kind, settings, patch, merge = CASES[case]
    data = file(picture(*size), "PNG")
    made = picture_processing(
        {"image_processor_type": f"{kind}ImageProcessorFast", **settings}, model_type, patch, merge, {}, WHERE
    )
    found = made.prepare_picture(data)
    ours = np.concatenate([blocks(part, patch, merge) for part in normalised(made, found)])
    patches, all_found = processed(kind, settings, data, patch, merge)
    assert ours.shape == patches.shape
    assert np.abs(ours - patches).max() < 2e-6
    positions = found.num_positions * len(found.parts)
    assert positions == len(patches) // merge**2
    assert made.placeholder(found) == placeholder(case, all_found, patch, merge, found.num_positions)
    assert made.placeholder(found).count(made.token) == positions


def placeholder(case: str, found: Any, patch: int, merge: int, positions: int) -> str:
    """Return what the processor of the model's type puts into a prompt."""
    if "qwen" in case:
        return "<|image_pad|>" * positions
    if case.startswith("gemma3"):
        tokenizer = SimpleNamespace(
            boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
        )
        whole = f"\n\n{tokenizer.boi_token}{tokenizer.image_token * positions}{tokenizer.eoi_token}\n\n"
        return str(Gemma3Processor.replace_image_token(SimpleNamespace(full_image_sequence=whole), found, 0))
    if case.startswith("gemma4"):
        processor = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
        return str(Gemma4Processor.replace_image_token(processor, found, 0))
    if case.startswith("pixtral"):
        height, width = found["image_sizes"][0]  # its processor cannot be imported without torchvision
        rows = ["[IMG]" * (width // patch // merge)] * (height // patch // merge)
        return "[IMG_BREAK]".join(rows) + "[IMG_END]"
    if case.startswith(("idefics3", "smolvlm")):
        processor = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            global_image_tag="<global-img>",
            image_token="<image>",
            image_seq_len=positions,
        )
        return str(Idefics3Processor.replace_image_token(processor, found, 0))
    return "<image>" * positions


@pytest.mark.parametrize("case", ["qwen", "pixtral of llava", "smolvlm", "gemma3", "gemma4 default"])
def test_a_low_detail_takes_no_more_positions(case: str) -> None:
    model_type, kind, settings, patch, merge = CASES[case]
    made = picture_processing(
        {
            **settings,
            "image_processor_type": f"{kind}ImageProcessor",
        },
        model_type,
        patch,
        merge,
        {},
        WHERE,
    )
    data = file(picture(1500, 900), "JPEG")
    low, high = (made.prepare_picture(data, detail) for detail in ("low", "high"))
    fixed = case == "gemma3"
    counts = [made.placeholder(one).count(made.token) for one in (low, high)]
    assert counts[0] == counts[1] if fixed else counts[0] < counts[1] / 2
    assert counts[0] == low.num_positions * len(low.parts)


def test_a_folders_own_tokens_stand_for_a_picture() -> None:
    made = picture_processing(
        {"patch_size": 28, "size": {"longest_edge": 56}},
        "mistral3",
        14,
        2,
        {"image_token": "<p>", "image_break_token": "/"},
        WHERE,
    )
    found = made.prepare_picture(file(picture(56, 56)))
    assert made.placeholder(found) == "<p><p>/<p><p>[IMG_END]"
    assert made.mark == "<p>"


@pytest.mark.parametrize("case", ["qwen", "pixtral", "smolvlm", "gemma3", "gemma4"])
def test_each_part_of_pictures_has_its_places_in_a_prompt(case: str) -> None:
    model_type, kind, settings, patch, merge = CASES[case]
    raw = {"image_processor_type": f"{kind}ImageProcessor", **settings}
    made = picture_processing(raw, model_type, patch, merge, {}, WHERE)
    found = [made.prepare_picture(file(picture(*size))) for size in ((90, 150), (64, 64))]
    prompt = "".join(f"text{made.placeholder(one)}" for one in found)
    ids = [ord(character) for character in prompt.replace(made.token, "\0").replace("[IMG_BREAK]", "|")]
    spans = image_spans(ids, 0, found)
    assert len(spans) == sum(len(one.parts) for one in found)
    covered = [span.place(row) for span in spans for row in range(span.source.num_positions)]
    assert covered == [place for place, token in enumerate(ids) if token == 0]
    for wrong in ([*ids, 0], ids[: max(covered)]):
        with pytest.raises(ValueError, match="places for pictures"):
            image_spans(wrong, 0, found)


# What processors with torchvision save too; none of it is about the pixels.
OF_TORCHVISION = {"device": None, "disable_grouping": None, "return_tensors": None, "data_format": "channels_first"}


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("null")])
def test_settings_that_transformers_saves_are_read_whole(case: str, tmp_path: Path) -> None:
    model_type, kind, settings, patch, merge = CASES[case]
    config: Any = SimpleNamespace(model_type=model_type, pictures=SimpleNamespace(patches=PatchConfig(patch, merge)))
    getattr(transformers, f"{kind}ImageProcessorPil")(**settings).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    own = {"image_processor_type": f"{kind}ImageProcessor", **settings}
    for name, more in (("", {}), ("Fast", OF_TORCHVISION)):
        written = {**saved, **more, "image_processor_type": f"{kind}ImageProcessor{name}"}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
        assert read_pictures(tmp_path, config) == (picture_processing(own, model_type, patch, merge, {}, WHERE), [])


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("Donut", {}, "DonutImageProcessor are not served"),
        ("Qwen2VL", {"do_resize": False}, "do_resize = false"),
        ("Qwen2VL", {"patch_size": 16}, "patch_size is 16, config.json has 14"),
        ("Qwen2VL", {"merge_size": 3}, "merge_size is 3"),
        ("Qwen2VL", {"size": {"shortest_edge": 1}}, "size: longest_edge must be"),
        ("Qwen2VL", {"size": {"shortest_edge": 1, "longest_edge": 10**12}}, "from 1 to 32,000,000"),
        ("Qwen2VL", {"size": {"shortest_edge": 1, "longest_edge": 9}}, "784 pixels or more"),
        ("Pixtral", {"size": {"height": 9, "width": 9}}, "size: longest_edge must be"),
        ("SmolVLM", {"max_image_size": {"longest_edge": 30}}, "max_image_size must be a multiple of 28"),
        ("CLIP", {"size": 30, "do_center_crop": False}, "squares of one size"),
        ("SmolVLM", {"max_image_size": {"longest_edge": 2800}}, "2800 pixels a side are more than 64 x 28"),
        ("Siglip", {"size": {"height": 2800, "width": 2800}}, "2800 pixels a side"),
        ("Llava", {"do_pad": True}, "do_pad = true"),
        ("Gemma4", {"max_soft_tokens": 100}, "max_soft_tokens must be one of 70, 140, 280, 560, 1120, found 100"),
        ("Gemma4", {"pooling_kernel_size": 4}, "pooling_kernel_size is 4, config.json has 2"),
        ("Qwen2VL", {"patch_size": 28}, "patch_size is 28, config.json has 14"),
        ("Qwen2VL", {"do_rescale": None}, "do_rescale = false"),
        ("CLIP", {"size": {"shortest_edge": 50, "longest_edge": 60}}, "size must have shortest_edge alone"),
        ("Siglip", {"do_resize": None}, "squares of one size"),
    ],
    ids=str,
)
def test_settings_that_make_no_pictures_are_refused(kind: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        picture_processing({"image_processor_type": f"{kind}ImageProcessor", **settings}, "llava", 14, 2, {}, WHERE)
    assert WHERE in str(refused.value)


@pytest.mark.parametrize(("case", "size"), [("qwen", (1, 202)), ("pixtral of llava", (1, 16000))])
def test_a_picture_that_no_patch_fits_is_refused(case: str, size: tuple[int, int]) -> None:
    model_type, kind, settings, patch, merge = CASES[case]
    raw = {"image_processor_type": f"{kind}ImageProcessor", **settings}
    made = picture_processing(raw, model_type, patch, merge, {}, WHERE)
    with pytest.raises(ImageError, match=f"{size[0]} x {size[1]} pixels"):
        made.prepare_picture(file(picture(*size)))


def test_a_folder_says_how_its_pictures_are_prepared(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(model_type="mistral3", pictures=SimpleNamespace(patches=PatchConfig(14, 2)))
    assert read_pictures(tmp_path, config) == (
        None,
        ["preprocessor_config.json and processor_config.json are missing: pictures are not read"],
    )
    image = {
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": 56},
        "odd": 1,
        "do_pad": True,
    }
    whole = {"image_processor": image, "patch_size": 14, "image_break_token": "<nl>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    special = {"image_token": {"content": "<pic>"}, "boi_token": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": special}))
    made, warnings = read_pictures(tmp_path, config)
    assert made is not None
    assert (made.most, made.token, made.row_end) == (56, "<pic>", "<nl>")
    assert warnings == ["processor_config.json: image_processor: unknown settings are ignored: odd"]
    assert PictureProcessing(**json.loads(json.dumps(asdict(made)))).prepare_picture(
        file(picture(50, 90))
    ) == made.prepare_picture(file(picture(50, 90)))
