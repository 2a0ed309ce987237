"""CLIP and SigLIP: vectors of texts and images are those of `transformers`, alone and in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import copied, native_backends, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, Source, image_source, token_source
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine.builder import load
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.engine.scheduling.scheduled_step import StepBudget
from triptych.model.errors import ConfigError
from triptych.service.cli.inspection import show

KINDS = ("clip", "siglip", "siglip2")
SHAPE = (3, 34, 34)
SHAPES = ((3, 16, 40), (3, 24, 24), (3, 48, 8))  # of images of any proportions


def texts(kind: str) -> list[tuple[int, ...]]:
    if kind != "clip":  # filled up to 16 tokens
        return [(*range(7, 7 + length), 2, *[1] * (15 - length)) for length in (1, 5, 9)]
    return [(1, *range(7, 7 + length), 3) for length in (1, 5, 9)] + [(1, 8, 3, 9, 3)]


def pixels(kind: str) -> list[Tensor]:
    random, shapes = torch.Generator().manual_seed(0), SHAPES if kind == "siglip2" else [SHAPE] * 3
    return [torch.randint(256, shape, generator=random, dtype=torch.uint8) for shape in shapes]


def engine(kind: str, path: Path | None = None, **settings: object) -> EncodeEngine:
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", **settings})  # type: ignore[arg-type]
    return load(ModelSpec(kind, str(path or saved(kind).path), config)).encode


def sources(kind: str) -> list[Source]:
    images = [
        image_source(
            one.numpy().tobytes(), tuple(one.shape), one.shape[1] // 8 * (one.shape[2] // 8) + (kind == "clip")
        )
        for one in pixels(kind)
    ]
    return [*map(token_source, texts(kind)), *images]


def encoded(engine: EncodeEngine, given: list[Source]) -> Tensor:
    """Return the vectors of inputs that wait together."""
    for number, source in enumerate(given):
        engine.add(EncodeRequest(str(number), engine.name, source))
    found = {}
    while engine.has_work:
        for output in engine.step()[0]:
            found[int(output.request_id)] = torch.frombuffer(bytearray(output.data), dtype=torch.float32)
    return torch.stack([found[number] for number in range(len(given))])


@torch.inference_mode()
def theirs(kind: str) -> Tensor:
    model = saved(kind).reference
    checkpoint = read_checkpoint(saved(kind).path)
    assert checkpoint.images is not None
    scale, shift = (torch.tensor(one)[:, None, None] for one in (checkpoint.images.scale, checkpoint.images.shift))
    of_texts = [model.get_text_features(torch.tensor([ids])).pooler_output for ids in texts(kind)]
    images = [one * scale + shift for one in pixels(kind)]
    given = filled_up(images) if kind == "siglip2" else dict(pixel_values=torch.stack(images))
    return torch.cat([*of_texts, model.get_image_features(**given).pooler_output])


def filled_up(images: list[Tensor], patch: int = 8) -> dict[str, Tensor]:
    """Return images of any proportions as the library's model takes them: patches, a mask, rows and columns."""
    shapes = [(one.shape[1] // patch, one.shape[2] // patch) for one in images]
    patches = [
        one.reshape(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        for one, (rows, columns) in zip(images, shapes, strict=True)
    ]
    masks = [torch.ones(len(one), dtype=torch.int64) for one in patches]
    pad = torch.nn.utils.rnn.pad_sequence
    return dict(
        pixel_values=pad(patches, batch_first=True),
        pixel_attention_mask=pad(masks, batch_first=True),
        spatial_shapes=torch.tensor(shapes),
    )


def cosines(ours: Tensor, expected: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(ours, expected)


@pytest.mark.parametrize("backend", ["sdpa", *(backend.name for backend in native_backends()[:1])])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_texts_and_images_are_transformers(kind: str, backend: str) -> None:
    expected = theirs(kind)
    ours = encoded(engine(kind, attention_backend=backend), sources(kind))
    assert (cosines(expected[:-1], expected[1:]) < 0.98).all()  # no two are alike
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_images_pause_between_layers(kind: str) -> None:
    """A budget below one image's patches divides its layers over steps, and texts wait their turn."""
    made, given = engine(kind), sources(kind)
    for number, source in enumerate(given):
        made.add(EncodeRequest(str(number), made.name, source))
    found, steps = {}, 0
    while made.has_work:
        steps += 1
        for output in made.step(StepBudget(whole_tokens=9))[0]:
            found[int(output.request_id)] = torch.frombuffer(bytearray(output.data), dtype=torch.float32)
    assert steps > 4 and torch.allclose(torch.stack([found[at] for at in range(len(given))]), theirs(kind), atol=1e-3)


@pytest.mark.skipif(not native_backends(), reason="no compiler for the C kernels")
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_same_bits_in_any_batch(kind: str, dtype: str, quantization: str) -> None:
    made = engine(kind, dtype=dtype, quantization=quantization)
    assert made.model.vision is not None and made.model.vision.runner is not None
    given = sources(kind)
    together, alone = encoded(made, given), torch.cat([encoded(made, [one]) for one in given])
    assert torch.equal(together, alone)
    assert (cosines(together, theirs(kind)) > 0.98).all()


def test_the_similarity_of_both_is_read() -> None:
    for kind in KINDS:
        reference = saved(kind).reference
        scale, bias = engine(kind).model.joint.similarity  # type: ignore[union-attr]
        assert scale == pytest.approx(reference.logit_scale.exp().item(), rel=1e-5)
        assert bias == pytest.approx(0.0 if kind == "clip" else reference.logit_bias.item(), rel=1e-5)


def test_the_first_end_of_older_files_is_the_largest_id(tmp_path: Path) -> None:
    """Files from before transformers 4.31 say 2, whatever the vocabulary."""
    folder = copied("clip", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    from transformers import CLIPModel

    ids = (1, 7, 8, 95, 9, 3)
    with torch.inference_mode():
        expected = CLIPModel.from_pretrained(folder).get_text_features(torch.tensor([ids])).pooler_output
    assert torch.allclose(encoded(engine("clip", folder), [token_source(ids)]), expected, atol=1e-4)


@pytest.mark.parametrize("unit", [False, True])
def test_a_folder_of_sentence_transformers_has_the_same_vectors(unit: bool, tmp_path: Path) -> None:
    copied("clip", tmp_path).rename(tmp_path / "0_CLIPModel")
    kinds = ["CLIPModel", "Normalize"][: 1 + unit]
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    ours, expected = encoded(engine("clip", tmp_path), sources("clip")), theirs("clip")
    assert torch.allclose(ours, torch.nn.functional.normalize(expected) if unit else expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "part", "changes", "words"),
    [
        ("clip", "vision_config", {"image_size": [32, 16]}, "image_size must be a number of pixels of a square"),
        ("clip", "vision_config", {"patch_size": 64}, "less than the patch size"),
        ("siglip", "vision_config", {"vision_use_head": False}, "vision_use_head = false"),
        ("siglip", "text_config", {"projection_size": 40}, "projection_size = 40 numbers, of images 48"),
        ("clip", "", {"text_config": 3}, "text_config must be an object"),
    ],
)
def test_folders_that_are_refused(kind: str, part: str, changes: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        read_checkpoint(folder)


def test_inspect_shows_both_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    show("clip", saved("clip").path, context=20, memory=1 << 30)
    shown = capsys.readouterr().out
    assert "17 rows of an image" in shown and "20 tokens" in shown and "space of texts and images" in shown


def test_both_stacks_are_not_split_over_gpus() -> None:
    with pytest.raises(ConfigError, match="a clip with a stack for images is not split"):
        engine("clip", tensor_parallel_size=2)
