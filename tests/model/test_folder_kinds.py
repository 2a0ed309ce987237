"""A path that is no model folder gets one short error line: what it is, and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model.checkpoints import copied, loaded, saved
from tests.model.texts import bytes_tokenizer
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError
from triptych.model.network.weights import load_model
from triptych.service.cli.main import main
from triptych.service.runtimes.model_reader import card_examples, read_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345678\n"
WEIGHTS = "model.safetensors"
SHARD = "model-00001-of-00001.safetensors"


def write(folder: Path, **files: str) -> None:
    """Write files by names in which two underscores stand for the dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def adapter(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    write(folder, adapter_config__json=json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))


def adapter_of(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        adapter(folder)
        write(folder, adapter_config__json=json.dumps({"peft_type": kind, "base_model_name_or_path": "org/base"}))

    return make


def adapter_beside_a_model(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    write(folder, adapter_config__json="{}")


def onnx(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(bytes(10))


def cache(folder: Path) -> None:
    commit = folder / "snapshots" / "c0ffee"
    commit.mkdir(parents=True)
    for file in (WEIGHTS, "config.json", "generation_config.json"):
        if (folder / file).exists():
            (folder / file).rename(commit / file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")


def below(*names: str) -> Callable[[Path], None]:
    def move(folder: Path) -> None:
        config = (folder / "config.json").read_text()
        for file in list(folder.iterdir()):
            file.unlink()
        for name in names:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(config)

    return move


def emptied(*kept: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in list(folder.iterdir()):
            file.unlink()
        for name in kept:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text('{"model_type": "llama"}')

    return remove


def pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(POINTER)


def broken_link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/0000")


def for_another_program(*names: str) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "config.json").write_text('{"dim_in": 64}')
        for name in names:
            (folder / name).write_bytes(b"x")

    return leave


def looping_link(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.symlink("config.json", folder / "config.json")


def shards(*numbers: int) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for number in numbers:
            save_file({f"t{number}": torch.zeros(1)}, folder / f"model-{number:05}-of-00003.safetensors")

    return rename


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (adapter, r"a LoRA adapter of org/base, not a model: serve that model with --lora NAME="),
    "an IA3 adapter": (adapter_of("IA3"), r"an adapter of PEFT's type IA3 of org/base, not a model: merge it"),
    "a trained prompt": (adapter_of("PREFIX_TUNING"), r"an adapter of PEFT's type PREFIX_TUNING .*cannot be merged"),
    "an adapter beside a model": (adapter_beside_a_model, "a LoRA adapter, not a model: serve that model"),
    "ONNX": (onnx, "a model in ONNX: serve the folder that it was exported from"),
    "a pointer as config": (pointer("config.json"), r"config\.json: a Git LFS pointer.*git lfs pull"),
    "a pointer as tokenizer": (pointer("tokenizer.json"), r"tokenizer\.json: a Git LFS pointer.*git lfs pull"),
    "a pointer as pieces": (pointer("spiece.model"), r"spiece\.model: a Git LFS pointer.*git lfs pull"),
    "pointers beside it": (pointer("tokenizer_config.json"), r"tokenizer_config\.json: a Git LFS pointer"),
    "a pointer as weights": (pointer(WEIGHTS), r"model\.safetensors: a Git LFS pointer.*git lfs pull"),
    "a Hub cache": (cache, r"a model's folder in the Hub's cache: give \S+/snapshots/c0ffee$"),
    "the whole Hub cache": (below("models--org--name"), "the Hub's cache, of 1 models: .*hf:org/name"),
    "a trainer's output": (
        below("checkpoint-90", "checkpoint-500"),
        r"2 checkpoints: .* the last is \S+checkpoint-500$",
    ),
    "a folder of models": (
        below("one", "two"),
        "a folder of 2 models: give one of them, one, two, or all with --models-dir",
    ),
    "a folder deeper": (below("model"), r"the model is in a folder in it: give \S+/model$"),
    "empty": (emptied(), "the folder is empty"),
    "a tokenizer": (
        emptied("tekken.json"),
        r"tekken\.json alone: a tokenizer without a model; config\.json is missing",
    ),
    "of the authors": (emptied("consolidated.safetensors", "params.json"), "in the authors' own format"),
    "DeepSpeed": (emptied("zero_to_fp32.py", "latest"), r"a checkpoint of DeepSpeed: run its zero_to_fp32\.py"),
    "distributed": (emptied("__0_0.distcp", ".metadata"), "a distributed checkpoint of PyTorch: merge it"),
    "diffusers": (emptied("model_index.json"), "a pipeline of diffusers"),
    "something": (emptied("notes.md"), r"config\.json is missing, found notes\.md; expected"),
    "TensorFlow": (emptied("config.json", "tf_model.h5"), "a model of TensorFlow: convert it"),
    "OpenVINO": (emptied("config.json", "openvino_model.xml"), "a model of OpenVINO"),
    "no weights": (
        emptied("config.json"),
        r"no model\.safetensors and no pytorch_model\.bin.*download or copy the weights",
    ),
    "other weights": (
        emptied("config.json", "lora.safetensors"),
        r"found lora\.safetensors: if that is the model, call",
    ),
    "CTranslate2": (
        for_another_program("model.bin", "vocabulary.json"),
        r"of CTranslate2 .* that it was converted from",
    ),
    "another program": (for_another_program("kokoro-v1_0.pth"), r"config\.json has no model_type.*for another program"),
    "a broken link": (broken_link, r"model\.safetensors is a link to a file that is not there"),
    "a link in a circle": (looping_link, r"config\.json is a link to a file that is not there"),
    "parts of GGUF": (emptied("m-00002-of-00003.gguf"), r"the first is missing, m-00001-of-00003\.gguf"),
    "some of the shards": (
        shards(1, 3),
        r"model-00002-of-00003\.safetensors \(1 of 3\).* no model\.safetensors\.index\.json",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_folder_is_and_what_to_do(kind: str, tmp_path: Path) -> None:
    spoil, message = KINDS[kind]
    folder = copied("llama", tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as error:
        read_checkpoint(folder)
    text = str(error.value)
    assert text.startswith(f"{folder}: ") and len(text) <= 600 and "\n" not in text


def test_the_places_that_a_message_names_can_be_served(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    cache(folder)
    with pytest.raises(ConfigError) as error:
        read_checkpoint(folder)
    assert read_checkpoint(Path(str(error.value).rpartition(" ")[2])).config.can_generate


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (WEIGHTS, "a single file of weights: give the folder that has it"),
        ("config.json", "a file, and none that is served"),
        ("absent", "no such folder; expected"),
    ],
)
def test_what_a_file_is(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("llama").path / name
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(path)
    with pytest.raises(SystemExit):
        main(["serve", f"x={path}"])
    assert message in capsys.readouterr().err


def test_the_current_folder_has_a_name_in_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^\. \({tmp_path.name}\): the folder is empty"):
        read_checkpoint(Path())


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated, because a superuser may read everything."""
    folder = copied("llama", tmp_path)

    def refuse(path: Path, *arguments: object, **keywords: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r": config\.json cannot be read: Permission denied$"):
        read_checkpoint(folder)


def test_shards_without_an_index_are_read_where_all_are_there(tmp_path: Path) -> None:
    folder, expected = copied("llama", tmp_path), loaded("llama").state_dict()
    tensors = list(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    for number in (1, 2):
        save_file(dict(tensors[number - 1 :: 2]), folder / f"model-{number:05}-of-00002.safetensors")
    found = load_model(read_checkpoint(folder), SdpaBackend()).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _with_index(folder: Path, shard: str) -> None:
    """Add an index that gives the only weight file another name, and change the file's values."""
    tensors = load_file(folder / WEIGHTS)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / SHARD)
    (folder / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)})
    )


def test_a_whole_file_comes_before_shards_as_in_transformers(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    _with_index(folder, SHARD)
    assert [file.name for file in read_checkpoint(folder).weight_files] == [WEIGHTS]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, load_file(folder / WEIGHTS)["lm_head.weight"])


@pytest.mark.parametrize("named", ["other.safetensors", f"{WEIGHTS}.index.json"])
def test_the_file_that_config_json_names_is_read(tmp_path: Path, named: str) -> None:
    folder = copied("llama", tmp_path)
    _with_index(folder, SHARD)
    shutil.copyfile(folder / SHARD, folder / "other.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"transformers_weights": named}
    (folder / "config.json").write_text(json.dumps(raw))
    found, theirs = read_checkpoint(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert not found.warnings
    head = load_model(found, SdpaBackend()).state_dict()["head.weight"]
    assert torch.equal(head, theirs.lm_head.weight) and torch.equal(head, load_file(folder / SHARD)["lm_head.weight"])
    for wrong in ("../other.safetensors", "pytorch_model.bin", "a\0.safetensors", 3, "gone.safetensors"):
        (folder / "config.json").write_text(json.dumps(raw | {"transformers_weights": wrong}))
        with pytest.raises(ConfigError, match="transformers_weights "):
            read_checkpoint(folder)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "..", "", "a\0b", "x" * 5000])
def test_an_index_that_names_what_is_no_file_of_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = copied("llama", tmp_path)
    _with_index(folder, shard)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError) as error:
        read_checkpoint(folder)
    assert "x" * 100 not in str(error.value) and "\0" not in str(error.value)


IN_PLACE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is a named pipe, expected a file"),
    "a folder": (Path.mkdir, "is a folder, expected a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "is a link to a file that is not there"),
    "a huge file": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has 1048576 MiB; at most 128 are read"),
    "an empty file": (Path.touch, "is empty: copy or download it again"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
        *("special_tokens_map.json", "added_tokens.json", "modules.json", "1_Pooling/config.json"),
        *("model.safetensors.index.json", SHARD, "quantize_config.json", "chat_template.jinja"),
        "additional_chat_templates/default.jinja",
    ],
)
def test_what_is_no_file_to_read_is_named_and_never_opened(kind: str, name: str, tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    (folder / Path(name).parent).mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if name in (SHARD, f"{WEIGHTS}.index.json"):
        (folder / WEIGHTS).unlink()
    if name.startswith("1_"):
        listed = [{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
        (folder / "modules.json").write_text(json.dumps(listed))
    if name in ("special_tokens_map.json", "added_tokens.json"):
        bytes_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    put, message = IN_PLACE[kind]
    put(folder / name)
    if (Path(name).suffix, kind) in {(".jinja", "an empty file"), (".safetensors", "a huge file")}:
        return  # no template, and a damaged file of weights
    if name.endswith("jinja"):
        message = "characters" if kind == "a huge file" else message
        assert message in read_model(ModelSpec("t", str(folder))).chat_problem
        return
    with pytest.raises(ConfigError, match=rf"{re.escape(Path(name).name)} {message}"):
        read_model(ModelSpec("t", str(folder)))


@pytest.mark.parametrize(
    ("kind", "architecture", "message"),
    [
        ("bart", "BartForCausalLM", "a decoder without its encoder is not served; .* as BartForConditionalGeneration"),
        ("marian", "MarianForCausalLM", "a decoder without its encoder is not served"),
        ("t5-relu", "T5ForSequenceClassification", "its head is not served"),
        ("t5-relu", "T5ForTokenClassification", "its head is not served"),
        ("whisper", "WhisperForAudioClassification", "its head is not served"),
    ],
)
def test_parts_of_encoder_decoders_are_refused_by_their_architecture(
    kind: str, architecture: str, message: str, tmp_path: Path
) -> None:
    folder = copied(kind, tmp_path)
    read_checkpoint(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    if architecture.endswith("CausalLM"):
        read_checkpoint(folder)  # whole, by another name
        tensors = {name: one for name, one in load_file(folder / WEIGHTS).items() if "encoder." not in name}
        save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=f"architectures is {architecture}: {message}"):
        read_checkpoint(folder)


def test_a_pipe_in_place_of_a_card_or_of_settings_of_an_adapter_is_not_opened(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    for name in ("README.md", "adapter_config.json"):
        os.mkfifo(tmp_path / name)
    assert card_examples(tmp_path) == ()
    with pytest.raises(ConfigError, match="a LoRA adapter, not a model"):
        read_checkpoint(tmp_path)
