"""Every file that loading a folder looks for is in the list of files that a download fetches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import copied
from tests.model.tokenizer_folders import FOLDERS, write_folder
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.json_files import is_read
from triptych.model.engine.builder import load
from triptych.model.errors import ConfigError
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.runtimes.model_reader import read_model

# Files of other tools that refusals look for.
NOT_DOWNLOADED = {"adapter_model.bin", "adapter_model.safetensors"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Collect the paths that are looked for while a test runs."""
    found: set[Path] = set()
    for name in ("is_file", "exists", "open", "read_text", "read_bytes"):
        original = getattr(Path, name)

        def recorded(path: Path, *arguments: Any, original: Any = original, **settings: Any) -> Any:
            found.add(path)
            return original(path, *arguments, **settings)

        monkeypatch.setattr(Path, name, recorded)
    return found


def names_below(folder: Path, asked: set[Path]) -> set[str]:
    below = {str(path.relative_to(folder)) for path in asked if folder in path.parents and not path.is_dir()}
    return {name for name in below if not name.endswith(".gguf")} - NOT_DOWNLOADED


@pytest.mark.parametrize("kind", ["llama", "llama-sharded", "bert", "whisper", "vit", "t5-relu", "llama-sequence"])
def test_all_that_a_model_is_asked_for_is_downloaded(kind: str, asked: set[Path], tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    asked.clear()
    spec = ModelSpec("m", str(folder), EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20))
    read_model(spec)
    load(spec).close()
    names = names_below(folder, asked)
    assert "config.json" in names and not [name for name in names if not is_read(name)]


def test_all_that_modules_are_asked_for_is_downloaded(asked: set[Path], tmp_path: Path) -> None:
    folder = copied("bert", tmp_path)
    kinds = ("Transformer", "Pooling", "Dense")
    listed = [{"path": f"{at}_{kind}" if at else "", "type": f"models.{kind}"} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for entry, content in zip(listed[1:], ({"pooling_mode": "mean"}, {"in_features": 32}), strict=True):
        (folder / entry["path"]).mkdir()
        (folder / entry["path"] / "config.json").write_text(json.dumps(content))
    asked.clear()
    with pytest.raises(ConfigError, match="2_Dense: no model"):
        read_model(ModelSpec("m", str(folder), EngineConfig()))
    names = names_below(folder, asked)
    assert {"2_Dense/pytorch_model.bin", "1_Pooling/config.json", "sparse_linear.pt"} <= names | {"sparse_linear.pt"}
    assert not [name for name in names if not is_read(name)]


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_all_that_a_tokenizer_is_asked_for_is_downloaded(name: str, asked: set[Path], tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / name)
    asked.clear()
    Tokenizer.from_folder(folder)
    assert not [found for found in names_below(folder, asked) if not is_read(found)]


def test_what_bge_m3_and_colbert_have_besides_is_downloaded() -> None:
    assert all(map(is_read, ("sparse_linear.pt", "colbert_linear.pt", "artifact.metadata", "0_Transformer/vocab.txt")))
    assert not any(map(is_read, ("optimizer.pt", "training_args.bin", "rng_state.pth", "onnx/model.onnx")))
