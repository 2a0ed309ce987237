"""Towers and what makes rows of their outputs: equal to `get_image_features` of `transformers`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.matrix import rest_is_slow
from tests.model.checkpoints import copied, load_native, loaded, native_backends, saved
from tests.model.lora import matrices, write_adapter
from tests.model.picture_models import PICTURE_MODELS, SQUARES, pixels_for_reference
from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.native.library import native
from triptych.model.network import fused_ops
from triptych.model.network.native_stack import NativeStack
from triptych.model.network.weights import load_model

SIZES = [(16, 40), (8, 8), (40, 24)]


def pictures(kind: str) -> list[Tensor]:
    """Return some normalised pictures of sizes that a kind reads."""
    torch.manual_seed(0)
    side = SQUARES.get(kind)
    return [torch.randn(3, *((side, side) if side else size)) for size in SIZES]


def expected(kind: str, given: list[Tensor]) -> list[Tensor]:
    """Return the rows of each picture."""
    model = saved(kind).reference
    with torch.inference_mode():
        whole = model.get_image_features(**pixels_for_reference(kind, given))
    found = whole.pooler_output
    if (deep := getattr(whole, "deepstack_features", None)) is not None:  # rows of other layers follow
        parts = [one if isinstance(one, Tensor) else torch.cat(list(one)) for one in (found, *deep)]
        found = [torch.cat(parts, dim=1)]
    rows = [one.flatten(0, -2) for one in (found if isinstance(found, tuple | list) else [found])]
    lengths = [one.shape[1] * one.shape[2] // 64 for one in given]
    return list(torch.cat(rows).split(lengths))


@pytest.mark.parametrize("kind", PICTURE_MODELS)
def test_rows_are_the_features_of_transformers(kind: str) -> None:
    given = pictures(kind)
    for backend in (None, *native_backends()):
        model = loaded(kind, backend) if backend is not None else loaded(kind)
        for one, rows in zip(given, expected(kind, given), strict=True):
            with torch.inference_mode():
                whole = model.begin_picture(one)
                whole.advance(1)
                found = whole.finish()
            assert found.shape == rows.shape
            assert (found.float() - rows).abs().max() < 1e-4
            assert rows.std() > 1e-2


@pytest.mark.parametrize("kind", PICTURE_MODELS)
def test_c_computes_the_tower(kind: str) -> None:
    """Check what quantised folders need: all of their layers in C."""
    pictures_config = read_checkpoint(saved(kind).path).config.pictures
    assert pictures_config is not None
    assert NativeStack.unsupported(pictures_config.tower) is None


@pytest.mark.parametrize("kind", ["llava", "mistral3", "gemma3-pictures", "idefics3"])
@pytest.mark.parametrize("before", ["", "model."])
def test_towers_are_read_by_the_names_of_older_versions(kind: str, before: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("vision_tower.") and kind != "mistral3":
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        if before and not name.startswith("model."):
            name = name.replace("language_model.lm_head.", "lm_head.").replace(
                "language_model.model.", "language_model."
            )
            name = name if name.startswith("lm_head.") else before + name
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.warnings == []
    given = pictures(kind)[0]
    with torch.inference_mode():
        found = load_model(checkpoint, SdpaBackend()).begin_picture(given).finish()
        assert torch.equal(found, loaded(kind).begin_picture(given).finish())


# -- Projections with bounds (Gemma 4's smaller sizes).

BOUNDED = "gemma4-pictures"


def rows_of(folder: Path, one: Tensor, dtype: torch.dtype = torch.float32, quantization: str = "none") -> Tensor:
    """Return a picture's rows by C where it is there, else by torch."""
    checkpoint = read_checkpoint(folder)
    with torch.inference_mode():
        library = native()
        if library is None:
            return load_model(checkpoint, SdpaBackend()).begin_picture(one).finish()
        return load_native(checkpoint, library, dtype, quantization=quantization).begin_picture(one).finish().float()


@pytest.mark.parametrize("bound", ["input_min", "input_max", "output_min", "output_max"])
@pytest.mark.parametrize("part", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_bounds_cut_what_they_bound(bound: str, part: str, tmp_path: Path) -> None:
    """Check each kind of bound against the library, where the parts of one matrix have other bounds of their inputs."""
    folder, given = copied(BOUNDED, tmp_path), pictures(BOUNDED)[0]
    tensors, reference = load_file(folder / "model.safetensors"), deepcopy(saved(BOUNDED).reference)
    name = next(name for name in tensors if name.endswith(f"layers.1.{_SUBLAYERS[part]}.{part}.{bound}"))
    tensors[name] = tensors[name] / 4
    save_file(tensors, folder / "model.safetensors")
    reference.get_buffer(name).copy_(tensors[name])
    with torch.inference_mode():
        expected = reference.get_image_features(**pixels_for_reference(BOUNDED, [given])).pooler_output[0]
    found = rows_of(folder, given)
    assert (found - expected).abs().max() < 1e-4
    assert (found - rows_of(saved(BOUNDED).path, given)).abs().max() > 1e-3


_SUBLAYERS = dict.fromkeys(("q_proj", "v_proj", "o_proj"), "self_attn")
_SUBLAYERS |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")


@pytest.mark.parametrize(("quantization", "least"), [("none", 0.999), ("int8", 0.99)])
@pytest.mark.parametrize("kind", ["gemma4-pictures", "gemma4-dense-pictures"])
def test_fewer_bits_give_about_the_same_rows(kind: str, quantization: str, least: float) -> None:
    given = pictures(kind)[0]
    found = rows_of(saved(kind).path, given, torch.bfloat16, quantization)
    cosines = torch.nn.functional.cosine_similarity(found, expected(kind, [given])[0], dim=1)
    assert cosines.min() > least


def test_adapters_of_projections_with_bounds_are_refused(tmp_path: Path) -> None:
    pairs = matrices(saved(BOUNDED).reference, r"vision_tower.*q_proj\.linear", 2, seed=1)
    adapter = write_adapter(tmp_path, pairs)
    with pytest.raises(ConfigError, match="adapters of projections whose outputs have bounds are not served"):
        LLM(saved(BOUNDED).path, EngineConfig(dtype="float32", kv_cache_memory=1 << 22), lora={"one": adapter})


@pytest.mark.parametrize(
    "kind",
    rest_is_slow([kind for kind in PICTURE_MODELS if "gemma" not in kind], lambda kind: kind == "qwen2-5-vl-pictures"),
)
def test_kernels_of_a_gpu_make_the_same_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check attention and the small steps, in Triton's interpreter: patches turn by their rows and columns."""
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    from triptych.model.attention.triton import TritonBackend
    from triptych.model.attention.triton_kernels import INTERPRETED

    if not INTERPRETED:
        pytest.skip("there is a GPU: kernels are compiled, see -m gpu")
    monkeypatch.setattr(fused_ops, "on_gpu", lambda tensor: True)
    given = pictures(kind)[:1]
    with torch.inference_mode():
        found = loaded(kind, TritonBackend()).begin_picture(given[0]).finish()
    assert not fused_ops.broken
    assert (found - expected(kind, given)[0]).abs().max() < 1e-4
