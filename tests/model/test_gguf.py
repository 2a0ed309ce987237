"""The header of GGUF files: its values are read, and a damaged or hostile header is refused with its fault."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import copied
from tests.model.gguf_files import Blocks, conversions, converted, write_gguf
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import RopeScaling, RotaryConfig
from triptych.model.errors import ConfigError
from triptych.model.gguf import container
from triptych.model.gguf.container import GGUFModel, read_gguf
from triptych.model.gguf.paths import gguf_files, gguf_path, model_name
from triptych.model.network.weights import load_model

METADATA: dict[str, tuple[str, Any]] = {
    "general.architecture": ("STRING", "llama"),
    "a.number": ("UINT32", 7),
    "a.list": ("ARRAY", ["x", "yz"]),
    "a.few": ("ARRAY", ("UINT8", [1, 2, 3])),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors: dict[str, Tensor | Blocks] = {
        "first": torch.arange(6.0).view(2, 3),
        "second": ("Q4_0", (2, 32), bytes(36)),
    }
    return write_gguf(tmp_path / "x.gguf", METADATA, tensors)


def test_metadata_and_places_are_read(file: Path) -> None:
    model = read_gguf(file)
    assert (model.architecture, model.integer("a.number"), model.array("a.list")) == ("llama", 7, ["x", "yz"])
    assert model.get("a.few") == [1, 2, 3] and model.get("nothing", "else") == "else"
    assert set(model) == set(METADATA)
    first, second = model.tensors.values()
    assert (first.shape, first.type.name, first.nbytes) == ((2, 3), "F32", 24)
    assert (second.shape, second.type.name, second.nbytes) == ((2, 32), "Q4_0", 36)
    data = file.read_bytes()[first.offset : first.offset + first.nbytes]
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)


def test_version_2_is_the_same(tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / "x.gguf", METADATA, {}, version=2)).get("a.number") == 7


def place_of(data: bytes, text: str) -> int:
    """Return the offset after a string and its length."""
    return data.index(struct.pack("<Q", len(text)) + text.encode()) + 8 + len(text)


def put(form: str, at: int | str, value: int, skip: int = 0) -> Callable[[bytes], bytes]:
    """Return a change that replaces a number at an offset or after a string."""

    def change(data: bytes) -> bytes:
        place = at if isinstance(at, int) else place_of(data, at)
        packed = struct.pack(form, value)
        return data[: place + skip] + packed + data[place + skip + len(packed) :]

    return change


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no GGUF file: it has only 0 bytes"),
    "another magic": (lambda data: b"GGML" + data[4:], "no GGUF file: it begins with b'GGML'"),
    "version 1": (put("<I", 4, 1), "has version 1"),
    "big-endian": (put(">I", 4, 3), "is big-endian"),
    "too many tensors": (put("<Q", 8, 1 << 40), "tensors and 4 metadata entries"),
    "too many entries": (put("<Q", 16, 1 << 40), "metadata entries"),
    "more tensors than there are": (put("<Q", 8, 1000), "damaged"),
    "a key beyond the end": (put("<Q", 24, 1 << 60), "the key of metadata entry 0 has a length of"),
    "a string beyond the end": (put("<Q", "general.architecture", 1 << 60, 4), "general.architecture has"),
    "a string that is too long": (put("<Q", "general.architecture", 1 << 29, 4), "of 268435456 at most"),
    "a string that is no text": (lambda data: data.replace(b"llama", b"\xff\xfe\xff\xfe\xff"), "is not UTF-8"),
    "an array beyond the end": (put("<Q", "a.list", 1 << 60, 8), "a.list has 1152921504606846976 elements"),
    "a string of an array beyond the end": (put("<Q", "a.list", 1 << 60, 16), "a.list has a string beyond the end"),
    "an array of arrays": (put("<I", "a.list", 9, 4), "a.list is an array of type 9"),
    "an unknown type of value": (put("<I", "a.number", 99), "a.number has the unknown type 99"),
    "no dimensions": (put("<I", "first", 0), "first has 0 dimensions"),
    "five dimensions": (put("<I", "first", 5), "first has 5 dimensions"),
    "a size of nothing": (put("<Q", "first", 0, 4), "first has the sizes"),
    "sizes that overflow": (put("<Q", "first", 1 << 63, 4), "first has the sizes"),
    "rows that are cut": (put("<Q", "second", 48, 4), "second is Q4_0 with rows of 48, no multiple of 32"),
    "an unknown format": (put("<I", "second", 99, 20), "second is of type 99, which is not known"),
    "a format that is not served": (put("<I", "second", 9, 20), "second is of Q8_1, which is not served"),
    "an odd offset": (put("<Q", "second", 33, 24), "second is at 33, no multiple of the alignment"),
    "an offset beyond the end": (put("<Q", "second", 1 << 50, 24), "second ends at .*, beyond the end of the file"),
    "tensors that overlap": (put("<Q", "second", 0, 24), "the tensors first and second overlap"),
    "cut off": (lambda data: data[:-40], "beyond the end of the file"),
    "cut off in the header": (lambda data: data[:60], "beyond the end of the file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_refused_by_what_is_wrong(damage: str, file: Path) -> None:
    change, message = DAMAGES[damage]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        read_gguf(file)


def test_strings_of_an_array_are_limited(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are skipped one by one."""
    monkeypatch.setattr(container, "_MAX_ELEMENTS", 1)
    with pytest.raises(ConfigError, match=r"a\.list has 2 strings"):
        read_gguf(file)


def test_doubles_are_refused(tmp_path: Path) -> None:
    for name, metadata, tensors, message in (
        ("key", {"a.key": ("UINT32", 1), "b.key": ("UINT32", 2)}, {}, "a.key is there twice"),
        ("tensor", {}, {"one": torch.ones(8), "two": torch.ones(8)}, "the tensor one is there twice"),
    ):
        file = write_gguf(tmp_path / f"{name}.gguf", metadata, tensors)
        file.write_bytes(file.read_bytes().replace(b"b.key", b"a.key").replace(b"two", b"one"))
        with pytest.raises(ConfigError, match=message):
            read_gguf(file)


@pytest.mark.parametrize("alignment", [0, 24, 48, 1 << 30])
def test_an_alignment_must_be_a_power_of_two(alignment: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"general\.alignment must be a power of two"):
        read_gguf(write_gguf(tmp_path / "x.gguf", {"general.alignment": ("UINT32", alignment)}, {}))


def test_random_damage_is_read_or_refused(file: Path) -> None:
    """Whatever a byte becomes, reading gives a model or a `ConfigError`."""
    chosen, whole, refused = random.Random(0), file.read_bytes(), 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chosen.randint(1, 3)):
            data[chosen.randrange(len(data))] = chosen.choice((0, 1, 127, 128, 255))
        file.write_bytes(data[: chosen.choice((len(data), chosen.randrange(len(data))))])
        try:
            read_every_entry(read_gguf(file))
        except ConfigError:
            refused += 1
    assert 300 < refused < 600


def read_every_entry(model: GGUFModel) -> None:
    for key in model:
        model.get(key)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    split: dict[str, tuple[str, Any]] = {"split.count": ("UINT32", 2)}
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", {**METADATA, **split}, {"one": torch.ones(8)})
    with pytest.raises(ConfigError, match=r"files of the model are missing: m-00002-of-00002\.gguf"):
        read_gguf(first)
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", split, {"two": torch.ones(8)})
    model = read_gguf(first)
    assert model.paths == (first, second) and list(model.tensors) == ["one", "two"]
    assert model.tensors["two"].path == second and model_name(first) == "m"
    assert gguf_path(tmp_path) == first
    with pytest.raises(ConfigError, match="is a part of a model in 2 files"):
        read_gguf(second)
    write_gguf(second, split, {"one": torch.ones(64)})
    with pytest.raises(ConfigError, match="the tensor one is in another file"):
        read_gguf(first)


def test_which_file_a_path_means(file: Path, tmp_path: Path) -> None:
    assert gguf_path(file) == gguf_path(tmp_path) == file
    (tmp_path / "config.json").write_text("{}")  # some repositories have one next to the file
    assert gguf_path(tmp_path) == file
    write_gguf(tmp_path / "y.gguf", {}, {})
    with pytest.raises(ConfigError, match=r"has several models, x\.gguf, y\.gguf: give the path of one"):
        gguf_path(tmp_path)
    (tmp_path / "model.safetensors").touch()  # safetensors take precedence
    assert gguf_path(tmp_path) is None and gguf_path(tmp_path / "nowhere") is None


def test_files_for_another_purpose_are_named_and_no_models(file: Path, tmp_path: Path) -> None:
    """A folder often has such files next to a model."""
    kinds: dict[str, tuple[dict[str, tuple[str, Any]], str]] = {
        "mmproj-x": ({"general.architecture": ("STRING", "clip")}, "reads images or sounds"),
        "mmproj-y": ({"general.type": ("STRING", "mmproj"), **METADATA}, "reads images or sounds"),
        "lora": ({"general.type": ("STRING", "adapter"), **METADATA}, "a LoRA adapter without its model: merge both"),
        "matrix": ({"general.type": ("STRING", "imatrix"), "a.list": ("ARRAY", ["x"])}, "statistics for quantisation"),
        "vocab": ({"general.type": ("STRING", "vocab"), **METADATA}, "a vocabulary without weights"),
    }
    for name, (metadata, message) in kinds.items():
        other = write_gguf(tmp_path / f"{name}.gguf", metadata, {"one": torch.ones(8)})
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(other)
    assert gguf_files(tmp_path) == [file] and gguf_path(tmp_path) == file
    file.unlink()
    assert gguf_files(tmp_path) == []
    with pytest.raises(ConfigError, match="a LoRA adapter without its model"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="a vocabulary without weights"):
        read_checkpoint(write_gguf(tmp_path / "v.gguf", METADATA, {}))


def test_a_model_without_a_suffix_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Ollama's files have no suffix; suffixes in capitals work too."""
    path = converted("llama", tmp_path)
    expected = read_checkpoint(path).config
    for name in ("sha256-1a2b", "MODEL.GGUF"):
        renamed = path.rename(tmp_path / name)
        assert read_checkpoint(renamed).config == expected == read_checkpoint(tmp_path).config
        assert load_model(read_checkpoint(renamed), SdpaBackend()).config == expected
        path = renamed
    (tmp_path / "sha256-other").write_bytes(b"{}")
    assert gguf_files(tmp_path) == [path]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (31, "Q4_0_4_4, which llama.cpp no longer has: take the file in Q4_0; served are F32"),
        (38, "IQ4_NL_8_8, which llama.cpp no longer has: take the file in IQ4_NL;"),
        (40, "NVFP4, which is not served"),
    ],
)
def test_formats_that_are_not_served_are_named(number: int, message: str, file: Path) -> None:
    file.write_bytes(put("<I", "second", number, 20)(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        read_gguf(file)


def test_the_first_name_of_a_linear_factor_is_read(tmp_path: Path) -> None:
    """A factor without a type is linear, as in llama.cpp."""
    for changes in ({"rope__scale_linear": ("FLOAT32", 4.0)}, {"rope__scaling__factor": ("FLOAT32", 4.0)}):
        config = read_checkpoint(converted("llama", tmp_path, **changes)).config
        assert config.decoder is not None
        position = config.decoder.layers[0].attention.position
        assert isinstance(position, RotaryConfig)
        assert (position.scaling, position.factor) == (RopeScaling.LINEAR, 4.0)
    off = {"rope__scaling__factor": ("FLOAT32", 4.0), "rope__scaling__type": ("STRING", "none")}
    assert (
        read_checkpoint(converted("llama", tmp_path, **off)).config
        == read_checkpoint(converted("llama", tmp_path)).config
    )


def test_ids_beyond_the_vocabulary_count_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = {key: (kind, value) for key, (kind, value) in conversions()["llama"]["metadata"].items()}
    ids = {"bos": 3, "padding": (1 << 32) - 1, "eos": 96, "eot": 97}
    metadata |= {f"tokenizer.ggml.{name}_token_id": ("UINT32", token) for name, token in ids.items()}
    config = read_checkpoint(
        write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": torch.ones(97, 32)})
    ).config
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_ids) == (3, None, (96,))
    assert [record.getMessage() for record in caplog.records] == [
        "x.gguf: tokenizer.ggml.eot_token_id 97 is beyond the vocabulary, and ignored"
    ]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        # gpt-oss: a message of an output's reasoning ends with <|end|>, the output with another token.
        (("<|return|>", "<|end|>", "<|call|>", "<|message|>"), (0, 2)),
        (("<|flush|>", "<|end|>", "<|calls|>", "x"), (0, 2)),
        (("<|endoftext|>", "<|end|>", "<|call|>", "x"), (0, 1, 2)),
        (("<eos>", "<turn|>", "<|tool_response>", "x"), (0, 1, 2)),
        (("_<EOT>", "x", "</s>", "</s>"), (0, 1, 2)),  # the last one is HTML's
    ],
)
def test_what_ends_an_output_is_as_in_llama_cpp(texts: tuple[str, ...], ends: tuple[int, ...], tmp_path: Path) -> None:
    metadata = {key: (kind, value) for key, (kind, value) in conversions()["llama"]["metadata"].items()}
    metadata |= {
        "tokenizer.ggml.tokens": ("ARRAY", list(texts)),
        "tokenizer.ggml.token_type": ("ARRAY", ("INT32", [3, 3, 3, 4])),
        "tokenizer.ggml.eos_token_id": ("UINT32", 0),
        "tokenizer.ggml.eot_token_id": ("UINT32", 1),
    }
    file = write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": torch.ones(97, 32)})
    assert read_checkpoint(file).config.eos_token_ids == ends


def test_bounds_of_queries_keys_and_values_are_read(tmp_path: Path) -> None:
    """MPT's of MosaicML's StoryWriter, as its folder has them in `attn_config`."""
    decoder = read_checkpoint(converted("mpt", tmp_path, attention__clamp_kqv=("FLOAT32", 6.0))).config.decoder
    assert decoder is not None and {attention.clip for attention in decoder.attentions} == {6.0}


def test_the_temperature_of_yarn_is_read_without_queries_that_grow(tmp_path: Path) -> None:
    fixed = {"attention__temperature_scale": ("FLOAT32", 0.0)}
    config = read_checkpoint(converted("ministral3", tmp_path, **fixed)).config
    assert config.decoder is not None and config.model_type == "mistral"
    [position] = config.decoder.rotaries
    assert (position.scaling, position.growth, position.attention_factor) == (RopeScaling.YARN, 0.0, 1.0)


REFUSED: dict[str, tuple[dict[str, tuple[str, Any]], str]] = {
    "experts": ({"expert_weights_scale": ("FLOAT32", 2.5)}, r"llama\.expert_weights_scale is not served: 2\.5"),
    "widths of values": ({"attention__value_length": ("UINT32", 4)}, r"llama\.attention\.value_length 4 must be"),
    "layers that differ": (
        {"attention__head_count_kv": ("ARRAY", [2, 4])},
        r"llama\.attention\.head_count_kv differs from layer to layer",
    ),
    "a rope type": ({"rope__scaling__type": ("STRING", "su")}, r"llama\.rope\.scaling\.type 'su' is not served"),
    "more than a head that turns": ({"rope__dimension_count": ("UINT32", 9)}, r"dimension_count 9 must be from 0 to a"),
    "a temperature": ({"rope__scaling__attn_factor": ("FLOAT32", 1.5)}, r"scaling\.attn_factor 1\.5 is not served"),
    "long texts": ({"marvel": ("STRING", "x" * 1000)}, r"llama\.marvel is not served: 'x{100}'\.\.\.$"),
    "long lists": ({"marvel": ("ARRAY", [7] * 1000)}, r"llama\.marvel is not served: \[7, 7, 7, \.\.\.\]$"),
    "a pooling": ({"pooling_type": ("UINT32", 4)}, r"llama\.pooling_type 4 is not served"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_served_are_refused_by_their_key(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(converted("llama", tmp_path, **changes))


def test_windows_with_a_base_of_their_own_are_refused(tmp_path: Path) -> None:
    for kind in ("exaone4", "olmo3"):
        with pytest.raises(ConfigError, match=r"rope\.freq_base_swa 7\.0 must be rope\.freq_base, 500"):
            read_checkpoint(converted(kind, tmp_path, rope__freq_base_swa=("FLOAT32", 7.0)))


def test_recommended_sampling_is_read_or_refused_by_its_own_place(tmp_path: Path) -> None:
    def read(name: str, kind: str, value: Any) -> dict[str, Any]:
        metadata = {key: (kind, value) for key, (kind, value) in conversions()["llama"]["metadata"].items()}
        metadata[f"general.sampling.{name}"] = (kind, value)
        tensors = {"token_embd.weight": torch.ones(97, 32)}
        return read_checkpoint(write_gguf(tmp_path / "x.gguf", metadata, tensors)).sampling_defaults

    assert read("temp", "FLOAT32", 0.6)["temperature"] == 0.6
    assert read("top_p", "FLOAT64", 0.95)["top_p"] == 0.95
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    for kind, value in (("STRING", "hot"), ("FLOAT64", 1e300), ("FLOAT32", largest), ("FLOAT32", float("nan"))):
        with pytest.raises(ConfigError, match=r"x\.gguf: general\.sampling: temperature"):
            read("temp", kind, value)


def test_values_of_any_kind_are_read_or_refused(tmp_path: Path) -> None:
    """Metadata with wrong values or types gives a model or a `ConfigError`."""
    keys = [key.removeprefix("llama.") for key in conversions()["llama"]["metadata"] if key.startswith("llama.")]
    keys += ["attention.key_length", "rope.scaling.factor", "attention.causal", "pooling_type"]
    values: tuple[tuple[str, Any], ...] = (
        *(("UINT32", 0), ("INT32", -1), ("UINT32", (1 << 32) - 1), ("UINT32", 3), ("FLOAT32", float("nan"))),
        *(("STRING", "x"), ("BOOL", True), ("ARRAY", ("INT32", [])), ("ARRAY", [1, 2]), ("ARRAY", ["x"])),
    )
    refused = 0
    for key in keys:
        for value in values:
            try:
                read_checkpoint(converted("llama", tmp_path, **{key.replace(".", "__"): value}))
            except ConfigError:
                refused += 1
    assert refused > 60


def test_a_key_that_is_missing_is_named_as_the_metadata_has_it(tmp_path: Path) -> None:
    named = set()
    for kind in ("gpt2", "bert-no-pooler", "qwen3-next-every", "gemma3", "umt5-tied", "ernie4-5-moe"):
        metadata = {key: (str(how), value) for key, (how, value) in conversions()[kind]["metadata"].items()}
        own = [key for key in metadata if key.startswith(f"{metadata['general.architecture'][1]}.")]
        for key in own:
            left = {one: value for one, value in metadata.items() if one != key}
            with suppress(ConfigError):
                read_checkpoint(write_gguf(tmp_path / f"{kind}.gguf", left, {"token_embd.weight": torch.ones(97, 32)}))
                continue
            with pytest.raises(ConfigError) as raised:
                read_checkpoint(tmp_path / f"{kind}.gguf")
            assert "lacks" not in str(raised.value) and "wrong kind" not in str(raised.value), (key, raised.value)
            named |= {key} if f"{key} is missing" in str(raised.value) else set()
    assert {"gpt2.embedding_length", "qwen3next.ssm.conv_kernel", "bert.attention.head_count"} <= named


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", {"general.architecture": ("STRING", "mamba")}, {})
    with pytest.raises(ConfigError, match=r"general\.architecture 'mamba' is not served; served are llama, "):
        read_checkpoint(file)


def test_a_folder_with_safetensors_is_read_as_before(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    converted("llama", folder)
    assert read_checkpoint(folder).weight_files == (folder / "model.safetensors",)
