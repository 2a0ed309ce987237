"""Images: pixels and vectors of random models against `transformers`, and 1,000 hostile files through the sandbox."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from tests.model.checkpoints import randomise
from tests.model.picture_models import pixels_for_reference, randomise_buffers
from tests.model.test_images import file, picture, png_of
from tests.model.test_joint_space import filled_up
from tests.model.test_pictures import CASES, blocks, normalised, placeholder, processed
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, image_source, token_source
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.model import ImageConfig
from triptych.model.engine.builder import load
from triptych.model.families import read_settings
from triptych.model.network.weights import load_model
from triptych.model.vision.decoding import ImageError
from triptych.model.vision.pictures import picture_processing
from triptych.model.vision.processing import ImageProcessing, read_image_processing, with_defaults
from triptych.service.images.image_pool import ImagePool

_KINDS = ("PNG", "JPEG", "WEBP", "GIF")
_SIZES = ((1, 1), (37, 211), (224, 224), (333, 250), (1000, 60), (640, 481))
_HOSTILE = 1_000
# Its class, the type of its language model, and of its tower where the whole does not say it.
_TOWERS = {
    "llava": ("LlavaForConditionalGeneration", "llama", "clip_vision_model"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model"),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text", "gemma4_vision"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "pixtral"),
    "idefics3": ("Idefics3ForConditionalGeneration", "llama", "idefics3_vision"),
    "smolvlm": ("SmolVLMForConditionalGeneration", "llama", "smolvlm_vision"),
    "qwen2-5-vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ""),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ""),
}
_SECONDS = 2.0  # of one file at most, decoded in the sandbox


def run(report: Report, packages: Packages) -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("triptych.model").setLevel(logging.ERROR)
    for name in ("CLIP", "Siglip", "ViT", "DeiT"):
        for kind in _KINDS:
            for size in _SIZES:
                _pixels(report, name, kind, size)
    for seed in range(12):
        _vectors(report, random.Random(seed), f"{seed}")
    for case in CASES:
        choose = random.Random(case)
        for _ in range(20):
            _prepared(report, case, (choose.randint(1, 900), choose.randint(1, 900)))
    for seed in range(4):
        for kind in sorted(_TOWERS):
            _tower(report, kind, random.Random(seed), f"{seed}")
    asyncio.run(_hostile(report))


def _pixels(report: Report, name: str, kind: str, size: tuple[int, int]) -> None:
    data = file(picture(*size), kind)
    theirs = getattr(transformers, f"{name}ImageProcessorPil")()(
        Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np"
    )["pixel_values"][0]
    made = read_image_processing(
        with_defaults({"image_processor_type": f"{name}ImageProcessor"}, "vit"), ImageConfig(224, 16)
    )
    ours = np.frombuffer(made.prepare(data), np.uint8).reshape(3, 224, 224)
    ours = ours * np.array(made.scale)[:, None, None] + np.array(made.shift)[:, None, None]
    report.check(f"pixels: {name}: {kind}: {size}", bool(np.abs(ours - theirs).max() < 1e-5))


def _model(choose: random.Random) -> Any:
    """Return a random CLIP or SigLIP of odd sizes."""

    def stack() -> dict[str, Any]:
        heads, width = choose.choice((1, 3, 5, 7)), choose.choice((4, 8, 12, 20))
        return dict(
            hidden_size=heads * width,
            num_attention_heads=heads,
            num_hidden_layers=choose.randint(1, 3),
            intermediate_size=choose.randint(9, 99),
        )

    patch = choose.choice((5, 8, 14))
    vision = stack() | dict(image_size=patch * choose.randint(1, 4) + choose.randint(0, 4), patch_size=patch)
    text = stack() | dict(vocab_size=90, max_position_embeddings=choose.randint(8, 40), eos_token_id=3, bos_token_id=1)
    if choose.random() < 0.5:
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=choose.randint(3, 50))
        return transformers.CLIPModel(config)
    text["projection_size"] = vision["hidden_size"]
    if choose.random() < 0.6:
        shown = dict(vision, num_patches=choose.randint(1, 6) ** 2)
        del shown["image_size"]
        return transformers.Siglip2Model(transformers.Siglip2Config(text_config=text, vision_config=shown))
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))


@torch.inference_mode()
def _vectors(report: Report, choose: random.Random, case: str) -> None:
    torch.manual_seed(choose.randint(0, 999))
    model = _model(choose).eval()
    randomise(model, 0.2)
    vision, longest = model.config.vision_config, model.config.text_config.max_position_embeddings
    texts = [(*choose.choices(range(5, 90), k=longest - 2), 3, 3) for _ in range(2)]
    any_shape = model.config.model_type == "siglip2"
    shapes = [
        (3, *(vision.patch_size * choose.randint(1, 4) if any_shape else vision.image_size for _ in range(2)))
        for _ in range(2)
    ]
    images = [torch.randint(256, shape, dtype=torch.uint8) for shape in shapes]
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        processing = with_defaults({}, model.config.model_type)
        size = vision.patch_size if any_shape else vision.image_size
        settings = {**processing, "size": size, "crop_size": size}
        made = read_image_processing(settings, ImageConfig(size, vision.patch_size))
        scale, shift = (torch.tensor(one)[:, None, None] for one in (made.scale, made.shift))
        scaled = [(one * scale + shift).float() for one in images]
        shown = filled_up(scaled, vision.patch_size) if any_shape else dict(pixel_values=torch.stack(scaled))
        expected = [
            *model.get_text_features(torch.tensor(texts)).pooler_output,
            *model.get_image_features(**shown).pooler_output,
        ]
        given = [*map(token_source, texts)]
        for one in images:
            rows, columns = one.shape[1] // vision.patch_size, one.shape[2] // vision.patch_size
            patches = rows * columns + (model.config.model_type == "clip")
            given.append(image_source(one.numpy().tobytes(), tuple(one.shape), patches))
        for quantization, least in (("none", 1 - 1e-4), ("int8", 0.97)):
            config = EngineConfig(device="cpu", dtype="float32", quantization=quantization)
            engine = load(ModelSpec("m", str(Path(folder)), config)).encode
            for number, source in enumerate(given):
                engine.add(EncodeRequest(str(number), "m", source))
            found = {}
            while engine.has_work:
                found |= {int(one.request_id): one.data for one in engine.step()[0]}
            for number, vector in enumerate(expected):
                ours = torch.frombuffer(bytearray(found[number]), dtype=torch.float32)
                cosine = torch.nn.functional.cosine_similarity(ours, vector, dim=0).item()
                name = f"vectors: {case}: {model.config.model_type}: {number}: {quantization}"
                report.check(name, cosine > least, f"cosine {cosine}")


def _prepared(report: Report, case: str, size: tuple[int, int]) -> None:
    """Compare the pixels and the text of a prompt's picture with those of its processor."""
    model_type, kind, settings, patch, merge = CASES[case]
    data, name = file(picture(*size)), f"prepared: {case}: {size[0]} x {size[1]}"
    raw = {"image_processor_type": f"{kind}ImageProcessor", **settings}
    made = picture_processing(raw, model_type, patch, merge, {}, "preprocessor_config.json")
    try:
        found = made.prepare_picture(data)
    except ImageError as error:
        try:
            processed(kind, settings, data, patch, merge)
        except ValueError:
            report.refuses(name, str(error))
        else:
            report.fails(name, str(error))
        return
    ours = np.concatenate([blocks(part, patch, merge) for part in normalised(made, found)])
    theirs, whole = processed(kind, settings, data, patch, merge)
    text = placeholder(case, whole, patch, merge, found.num_positions)
    same = ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() < 2e-6)
    report.check(name, same and made.placeholder(found) == text)


def _tower(report: Report, kind: str, choose: random.Random, case: str) -> None:
    """Compare the rows of pictures of a random tower with `get_image_features`."""
    architecture, text, tower = _TOWERS[kind]
    heads, width = choose.choice((1, 2, 3)), choose.choice((8, 12, 16))
    size, depth, hidden = heads * width, choose.randint(2, 5), choose.choice((24, 40))
    sizes = dict(hidden_size=hidden, num_attention_heads=2, num_key_value_heads=1, head_dim=hidden // 2)
    sizes |= dict(vocab_size=60, intermediate_size=30, model_type=text, num_hidden_layers=3)
    patch, merge, grid = choose.choice((3, 4, 7)), choose.choice((2, 3)), choose.randint(1, 4)
    vision: dict[str, Any] = dict(hidden_size=size, intermediate_size=choose.randint(9, 50), patch_size=patch)
    whole: dict[str, Any] = dict(image_token_id=5)
    if kind == "gemma4":
        sizes |= dict(hidden_size_per_layer_input=0)
        vision |= dict(num_attention_heads=heads, num_key_value_heads=1, num_hidden_layers=depth, head_dim=width)
        vision |= dict(pooling_kernel_size=merge, position_embedding_size=5 * merge, model_type=tower)
        vision |= dict(standardize=choose.random() < 0.5, use_clipped_linears=choose.random() < 0.5)
    elif tower:
        image = patch * merge * grid
        vision |= dict(num_attention_heads=heads, num_hidden_layers=depth, image_size=image, model_type=tower)
        merges = {"gemma3": dict(mm_tokens_per_image=grid**2), "mistral3": dict(spatial_merge_size=merge)}
        whole |= merges.get(kind, dict(scale_factor=merge) if kind in ("idefics3", "smolvlm") else {})
    else:
        sizes |= dict(
            rope_parameters=dict(rope_type="default", rope_theta=500.0, mrope_section=[hidden // 4 - 4, 2, 2])
        )
        vision |= dict(num_heads=heads, depth=depth, out_hidden_size=hidden, spatial_merge_size=merge)
        vision |= (
            dict(num_position_embeddings=grid**2, deepstack_visual_indexes=[0, depth - 1])
            if text.startswith("qwen3")
            else dict(window_size=patch * merge * choose.randint(1, 3), fullatt_block_indexes=[depth - 1])
        )
    torch.manual_seed(choose.randint(0, 999))
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(text_config=sizes, vision_config=vision, **whole)).float().eval()
    randomise(model, 0.2)
    randomise_buffers(model)
    side, cell = patch * merge * grid, patch * merge
    free = kind in ("gemma4", "mistral3", "qwen2-5-vl", "qwen3-vl")
    shapes = [(cell * choose.randint(1, 5), cell * choose.randint(1, 5)) if free else (side, side) for _ in range(3)]
    pictures = [torch.randn(3, *shape) for shape in shapes]
    with TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        config, _ = read_settings(json.loads((Path(folder) / "config.json").read_text()))
        checkpoint = replace(read_checkpoint(Path(folder)), config=config)
        ours = load_model(checkpoint, SdpaBackend())
        given = pixels_for_reference(kind, pictures, patch, merge)
        expected = model.get_image_features(**given).pooler_output
        rows = torch.cat(
            [one.flatten(0, -2) for one in (expected if isinstance(expected, tuple | list) else [expected])]
        )
        found = torch.cat([ours.begin_picture(one).finish()[:, :hidden] for one in pictures])
    far = float((found - rows).abs().max()) if found.shape == rows.shape else float("inf")
    report.check(f"towers: {kind}: {case}", far < 1e-4 * max(1.0, float(rows.abs().max())), f"differs by {far}")


def _chunked(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Yield files that claim, or have, far more pixels than bytes."""
    for side in (6_000, 20_000, 100_000, 2**31 - 1):
        yield f"png of {side}", png_of(side, side)
    for side in (5_700, 65_535):
        yield f"gif of {side}", b"GIF89a" + struct.pack("<HH", side, side) + b"\x00\x00\x00," + bytes(9)
    header = struct.pack(">IIBBBBB", 5_600, 5_600, 8, 2, 0, 0, 0)
    packed = zlib.compress(bytes(5_600 * (3 * 5_600 + 1)), 9)
    text = _chunked(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000_000), 9))
    yield (
        "png with a text of 100 MB",
        (
            b"\x89PNG\r\n\x1a\n"
            + _chunked(b"IHDR", header)
            + text
            + _chunked(b"IDAT", packed[:1000])
            + _chunked(b"IEND", b"")
        ),
    )
    yield (
        "jpeg of 65535",
        b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00\xff\xd9",
    )
    vp8x = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\xff\xff" * 2
    yield "webp of 16777216", b"RIFF" + struct.pack("<I", 4 + len(vp8x)) + b"WEBP" + vp8x


def _wrong(choose: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield files of other types, and good ones that are cut, spoiled or joined."""
    for kind in ("BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "DDS", "SGI", "IM", "MSP"):
        yield f"type {kind}", file(picture(16, 16).convert("1" if kind == "MSP" else "RGB"), kind)
    yield "svg", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    yield "pdf", b"%PDF-1.4\n"
    yield "zip", b"PK\x03\x04" + bytes(30)
    yield "nothing", b""
    good = {kind: file(picture(40, 30), kind) for kind in _KINDS}
    number = 0
    while True:
        kind = choose.choice(_KINDS)
        data, number = good[kind], number + 1
        if choose.random() < 0.6:
            yield f"cut {number} {kind}", data[: choose.randrange(1, len(data) * 3 // 4)]
        else:
            spoiled = bytearray(data)
            for at in choose.choices(range(len(data)), k=choose.choice((8, 60, len(data)))):
                spoiled[at] = choose.randrange(256)
            yield f"spoiled {number} {kind}", bytes(spoiled)


async def _hostile(report: Report) -> None:
    """Each file is refused in words, or gives pixels of the model's size, soon and with little memory here."""
    processing = ImageProcessing(32, (32, 32), None, 3, False, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    pool, before = ImagePool(10.0, 10**12, 1 << 30), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = _wrong(random.Random(0))
    files = [*_bombs()]
    files += [next(wrong) for _ in range(_HOSTILE - len(files))]
    images = pool.request()
    await images.prepare(file(picture(8, 8)), processing)  # starts the process
    for name, data in files:
        began = time.monotonic()
        try:
            taken = len(await images.prepare(data, processing)) == 3 * 32 * 32 and name.startswith("spoiled")
            told = "pixels of a file that must be refused"
        except ImageError as error:
            taken, told = 0 < len(str(error)) <= 300 and "\n" not in str(error), str(error)
        except Exception as error:
            taken, told = False, repr(error)
        report.check(f"hostile: {name}", taken, told)
        report.check(f"hostile: {name}: time", time.monotonic() - began < _SECONDS, "took long")
    pool.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    report.check("hostile: memory of the service", grown < 200_000, f"grew by {grown} KB")
