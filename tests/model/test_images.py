"""Image preprocessing: pixels within 1/255 of `transformers`, and bounded decoding."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from tests.model.checkpoints import copied, saved
from tests.model.parity import difference, hidden_states
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.model import ImageConfig
from triptych.model.errors import ConfigError
from triptych.model.network.weights import load_model
from triptych.model.vision.decoding import MAX_PIXELS, ImageError, decode
from triptych.model.vision.processing import read_image_processing, with_defaults

CONFIG = ImageConfig(size=32, patch=8)
SQUARE = {"size": {"height": 32, "width": 32}}


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image of noise over a gradient."""
    channels = {"RGB": 3, "L": 1, "RGBA": 4}[mode]
    noise = np.random.default_rng(0).integers(0, 128, (height, width, channels))
    values = (noise + np.linspace(0, 127, width)[None, :, None]).astype(np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values)


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def normalised(raw: dict[str, Any], data: bytes) -> np.ndarray:
    """Return the pixels `[3, S, S]` that the model gets."""
    made = read_image_processing(raw, CONFIG)
    pixels = np.frombuffer(made.prepare(data), np.uint8).reshape(3, CONFIG.size, CONFIG.size)
    return pixels * np.array(made.scale)[:, None, None] + np.array(made.shift)[:, None, None]


MOVING = dict(save_all=True, append_images=[picture(20, 30).rotate(90)], duration=50)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(("width", "height"), [(32, 32), (50, 70), (90, 40), (20, 20)])
@pytest.mark.parametrize(
    "settings",
    [
        SQUARE,
        {**SQUARE, "resample": 3},
        {**SQUARE, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {**SQUARE, "do_normalize": False},
        {**SQUARE, "do_rescale": False, "do_normalize": False},
        {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
    ],
    ids=str,
)
def test_pixels_are_transformers(kind: str, width: int, height: int, settings: dict[str, Any]) -> None:
    from transformers import ViTImageProcessorPil

    data = file(picture(width, height), kind)
    theirs = ViTImageProcessorPil(**settings)(Image.open(BytesIO(data)), return_tensors="np")["pixel_values"][0]
    made = read_image_processing(settings, CONFIG)
    step = max(made.scale)  # of one level of 255, as the model sees it
    assert np.abs(normalised(settings, data) - theirs).max() <= 1.001 * step
    assert theirs.std() > step


@pytest.mark.parametrize("name", ["CLIP", "Siglip", "Bit", "DeiT", "ViT"])
@pytest.mark.parametrize("given", [{}, {"size": 40}], ids=["nothing", "an older size"])
def test_a_processors_class_says_what_its_file_lacks(name: str, given: dict[str, Any]) -> None:
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(**given)
    data = file(picture(300, 250), "WEBP", lossless=True)
    pixels = theirs(Image.open(BytesIO(data)), return_tensors="np")["pixel_values"][0]
    settings = with_defaults({"image_processor_type": f"{name}ImageProcessorFast", **given}, "vit")
    if pixels.shape[1] != pixels.shape[2]:  # only a square is read
        over = pixels.shape[2] - pixels.shape[1]
        pixels = pixels[:, :, over // 2 : over // 2 + pixels.shape[1]]
        settings |= {"do_center_crop": True, "crop_size": pixels.shape[1]}
    made = read_image_processing(settings, ImageConfig(pixels.shape[1], 1))
    ours = np.frombuffer(made.prepare(data), np.uint8).reshape(pixels.shape)
    ours = ours * np.array(made.scale)[:, None, None] + np.array(made.shift)[:, None, None]
    assert np.abs(ours - pixels).max() < 1e-5


def _oriented(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return file(image, "JPEG", exif=exif)


DECODED = {
    **{f"{kind} of several frames": file(picture(20, 30), kind, **MOVING) for kind in ("GIF", "PNG", "WEBP")},
    **{f"orientation {turn}": _oriented(picture(20, 30), turn) for turn in (3, 6, 8)},
    "cmyk": file(picture(20, 30).convert("CMYK"), "JPEG"),
    "palette": file(picture(20, 30).convert("P"), "PNG", transparency=3),
    "one bit": file(picture(20, 30).convert("1"), "PNG"),
    "sixteen bits": file(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(30, 20)), "PNG"),
    "progressive": file(picture(20, 30), "JPEG", progressive=True),
    "transparent": file(picture(20, 30, "RGBA"), "WEBP"),
    "gif": file(picture(20, 30), "GIF"),
}


@pytest.mark.parametrize("name", DECODED)
def test_files_become_what_transformers_makes_of_them(name: str) -> None:
    theirs = load_image(base64.b64encode(DECODED[name]).decode())
    np.testing.assert_array_equal(np.asarray(decode(DECODED[name])), np.asarray(theirs))


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = picture(32, 32, mode)
    pixels = np.frombuffer(read_image_processing(SQUARE, CONFIG).prepare(file(image)), np.uint8).reshape(3, 32, 32)
    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_of_a_cameras_several_pictures_the_first_is_taken() -> None:
    first = picture(32, 32)
    data = file(first, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32))])
    assert np.abs(np.asarray(decode(data), int) - np.asarray(first, int)).mean() < 30


def test_without_settings_the_image_is_brought_into_the_models_shape() -> None:
    assert normalised({}, file(picture(50, 70))).shape == (3, 32, 32)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int) -> bytes:
    """Return a few bytes that claim to be an image of any size."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(b"\0" * 100)) + _chunk(b"IEND", b"")


REFUSED = {
    "nothing": (b"", "not an image file of JPEG, PNG, WEBP or GIF"),
    "text": (b"hello" * 20, "not an image file of JPEG, PNG, WEBP or GIF"),
    "bmp": (file(picture(8, 8), "BMP"), "not an image file of JPEG, PNG, WEBP or GIF"),
    "half a png": (file(picture(64, 64))[:2000], "the image file is broken"),
    "half a jpeg": (file(picture(64, 64), "JPEG")[:900], "the image file is broken"),
    "less than it claims": (png_of(100, 100), "the image file is broken"),
    "too many pixels": (png_of(100_000, 1000), "100000 x 1000 pixels, more than 32,000,000 are not taken"),
    "far too many pixels": (png_of(2**31 - 1, 2**31 - 1), "more than 32,000,000 pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_for_us_is_refused_in_words(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(ImageError, match=message):
        decode(data)


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each scan has a few bytes and passes over all pixels."""
    whole = file(picture(64, 64), "JPEG", progressive=True)
    scan = whole[whole.rfind(b"\xff\xda") : -2]
    assert decode(whole[:-2] + scan * 80 + whole[-2:]).size == (64, 64)
    with pytest.raises(ImageError, match=r"1\d\d scans, more than 100 are not taken"):
        decode(whole[:-2] + scan * 120 + whole[-2:])


def test_a_bomb_is_refused_by_its_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_decoding(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "convert", no_decoding)
    with pytest.raises(ImageError, match="pixels"):
        decode(png_of(MAX_PIXELS // 1000 + 1, 1000))


def test_any_byte_changed_gives_an_image_or_a_refusal() -> None:
    whole = [file(picture(16, 16), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    random = np.random.default_rng(0)
    for data in whole * 75:
        spoiled = bytearray(data)
        for at in random.integers(0, len(data), 3):
            spoiled[at] = random.integers(256)
        with suppress(ImageError):
            decode(bytes(spoiled))


@pytest.mark.parametrize(
    ("settings", "image", "message"),
    [
        ({"do_center_crop": True, "crop_size": 24}, CONFIG, "crop_size must be 32"),
        ({"image_mean": [0.5]}, CONFIG, "three channels"),
        ({}, ImageConfig(32, 8, channels=1), "three channels"),
    ],
)
def test_a_preprocessing_that_cannot_be_is_a_configuration_error(
    settings: dict[str, Any], image: ImageConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_image_processing(settings, image)


def test_a_thin_line_does_not_become_a_huge_strip() -> None:
    made = read_image_processing({"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": 32}, CONFIG)
    with pytest.raises(ImageError, match="1000000 x 1 pixels, which is too long and thin"):
        made.prepare(file(Image.new("RGB", (1_000_000, 1))))
    assert len(made.prepare(file(Image.new("RGB", (10_000, 100))))) == CONFIG.pixel_bytes


def test_an_image_that_is_not_resized_must_fit() -> None:
    with pytest.raises(ImageError, match="50 x 70 pixels, the model reads 32"):
        read_image_processing({"do_resize": False}, CONFIG).prepare(file(picture(50, 70)))


@pytest.mark.parametrize("kind", ["dinov2", "dinov2-registers"])
@pytest.mark.parametrize("size", [24, 48])
def test_positions_are_stretched_to_the_size_of_prepared_images(kind: str, size: int, tmp_path: Path) -> None:
    """DINOv2 is published with positions for images of 518 pixels, and a processor that makes 224."""
    folder = copied(kind, tmp_path)
    crop = {"do_center_crop": True, "crop_size": {"height": size, "width": size}, "size": {"shortest_edge": 2 * size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(crop))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.images is not None and checkpoint.images.size == size
    ours, inputs = hidden_states(load_model(checkpoint, SdpaBackend()))
    assert inputs[0]["pixel_values"].shape[-1] == size
    with torch.inference_mode():
        theirs = torch.cat([saved(kind).reference(**given).last_hidden_state[0] for given in inputs])
    assert difference(torch.cat(ours), theirs) < 1e-4
