"""Files of `torch.save` are read as published, and their code never runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import copied, saved
from tests.model.parity import MECHANISMS
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.network.weights import load_model

ROOT = Path(__file__).parents[2]


def parameters(folder: Path) -> dict[str, Tensor]:
    return load_model(read_checkpoint(folder), SdpaBackend()).state_dict()


def with_bin(kind: str, into: Path, *, legacy: bool = False) -> Path:
    """Write the folder as it was published before safetensors: with every entry of the state dict, also tied ones."""
    folder = copied(kind, into)
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors*")):
        if file.suffix == ".safetensors":
            state |= load_file(file)
        file.unlink()
    whole = saved(kind).reference.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in whole.items() if name in state}
    state |= {name: state[names[id(tensor)]] for name, tensor in whole.items() if id(tensor) in names}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return folder


TIED = (
    *("bert-no-pooler", "roberta-masked", "xlnet", "gpt2", "llama-tied"),
    *("t5-relu", "bart", "m2m-100", "marian", "whisper"),
)


@pytest.mark.parametrize("kind", sorted({*MECHANISMS, *TIED}))
def test_a_published_state_dict_gives_the_same_parameters(kind: str, tmp_path: Path) -> None:
    """In any order of names, a tied tensor is read by the embeddings' name."""
    folder = with_bin(kind, tmp_path)
    expected, found = parameters(saved(kind).path), parameters(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    if kind in TIED:
        state = torch.load(folder / "pytorch_model.bin", weights_only=True)
        torch.save(dict(reversed(state.items())), folder / "pytorch_model.bin")
        found = parameters(folder)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_layout_before_zip_archives_is_read(tmp_path: Path) -> None:
    expected, found = parameters(saved("bert").path), parameters(with_bin("bert", tmp_path, legacy=True))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(state)}
    for shard in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    expected, found = parameters(saved("llama").path), parameters(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_safetensors_are_taken_where_both_exist(tmp_path: Path) -> None:
    folder = copied("bert", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert [file.name for file in read_checkpoint(folder).weight_files] == ["model.safetensors"]


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_of_any_strides_and_dtype_are_found(tmp_path: Path, legacy: bool) -> None:
    """The tensors are views, transposed, empty, scalars, tied, or parameters; other objects are ignored."""
    base = torch.randn(6, 8)
    state: dict[str, object] = {
        "base": base,
        "part": base[1:3],
        "columns": base[:, 2:5],
        "transposed": base.t(),
        "tied": base,
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "half": torch.randn(3).half(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2, 2)),
        "position_ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "epoch": 7,
        "settings": {"rate": 0.5, "betas": (0.9, 0.999), "name": "a"},
    }
    file = tmp_path / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    found = {tensor.name: tensor for tensor in read_state_dict(file)}
    assert found.keys() == {name for name, value in state.items() if isinstance(value, Tensor)} - {"tied"}
    assert not found["transposed"].is_contiguous and not found["columns"].is_contiguous
    data = file.read_bytes()
    for name, tensor in found.items():
        value = state[name]
        assert isinstance(value, Tensor) and tensor.shape == value.shape
        if value.numel():
            there = torch.frombuffer(bytearray(data[tensor.offset :]), dtype=value.dtype, count=1)
            assert there[0] == value.flatten()[0], name


def test_a_matrix_that_was_saved_transposed_is_loaded(tmp_path: Path) -> None:
    folder = with_bin("llama", tmp_path)
    stored = load_file(saved("llama").path / "model.safetensors")
    state = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in stored.items()}
    torch.save(state, folder / "pytorch_model.bin")
    assert any(not tensor.is_contiguous for tensor in read_state_dict(folder / "pytorch_model.bin"))
    expected, found = parameters(saved("llama").path), parameters(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_bin_files_can_be_left_out(tmp_path: Path) -> None:
    folder = with_bin("bert", tmp_path)
    with pytest.raises(
        ConfigError, match=r"weights are in pytorch_model\.bin, which --no-pickle refuses; no model\.safetensors"
    ):
        read_checkpoint(folder, pickle=False)


def test_a_program_is_refused_by_what_it_calls(tmp_path: Path) -> None:
    folder = with_bin("bert", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n(X\x05\x00\x00\x00falsetR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a state dict .* calls os\.system"):
        read_checkpoint(folder)
    torch.save(torch.nn.Linear(2, 2), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="which no state dict needs"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.pt", "weights.pkl", "last.ckpt"])
def test_other_weight_files_are_named_and_never_opened(name: str, tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ConfigError, match=rf"no model\.safetensors and no pytorch_model\.bin, found {name}: "):
        read_checkpoint(folder)


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_hostile_and_mutated_files_do_nothing_and_end_soon(count: int) -> None:
    command = [sys.executable, "-m", "tests.model.hostile_pickles", str(count), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    hostile, mutated = map(int, done.stdout.split())
    assert hostile >= 54 and count // 2 < mutated < count
