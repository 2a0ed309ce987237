"""`triptych quantize`: a written folder has the integers that loading the weights in that format gives."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from tests.model.checkpoints import copied, native_backends, saved
from tests.model.gguf_files import converted
from tests.model.packers import CASES, folders
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import Pooling
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.formats import FORMATS, QUANTIZED_LAYERS
from triptych.model.errors import ConfigError
from triptych.model.linear.base import linears
from triptych.model.llm import LLM
from triptych.model.native.library import Kind, Library, native
from triptych.model.pretrained import embedded_models
from triptych.model.quantization import folder as writing
from triptych.model.quantization.folder import Report, quantize
from triptych.model.quantization.moments import input_moments
from triptych.model.quantization.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")


MODULES = (("", "Transformer"), ("after/pooling", "Pooling"))


def loaded(path: Path, quantization: str = "none", dtype: str = "auto") -> LLM:
    return LLM(path, EngineConfig(device="cpu", dtype=dtype, quantization=quantization, kv_cache_memory=8 << 20))


def arrays(llm: LLM) -> dict[str, Tensor]:
    """Return the arrays of all projections."""
    return {
        f"{linear.spec.name}:{name}": array
        for linear in linears(llm.network)
        for name, array in linear.filled_arrays().items()
    }


def must_be_equal(folder: Path, original: Path, form: str, dtype: str = "auto") -> None:
    written, asked = loaded(folder, dtype=dtype), loaded(original, form, dtype)
    assert (written.info.dtype, written.info.dtype_reason) == (form, "the checkpoint stores it so")
    assert (asked.info.dtype, asked.info.dtype_reason) == (form, "asked for")
    ours, expected = arrays(written), arrays(asked)
    assert ours.keys() == expected.keys()
    assert [name for name, array in expected.items() if not torch.equal(array, ours[name])] == []


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("llama-gqa", form) for form in QUANTIZED_LAYERS),
        ("llama-tied", "int4"),
        ("gpt2", "int4"),  # stored transposed
        ("gpt-neox", "int8-g128"),  # queries, keys and values interleaved by heads
        ("phi3", "int4-g32"),
        ("granitemoe", "int8"),  # its experts are in one tensor
        ("qwen3-next", "int8"),  # recurrent layers, whose inputs are stored by heads
        ("qwen3-5-moe", "int4-g32"),
        ("marian", "int4"),
        ("bert", "int4-g32"),
    ],
)
def test_a_written_folder_is_what_is_made_while_weights_are_loaded(kind: str, form: str, tmp_path: Path) -> None:
    original = saved(kind).path
    report = quantize(original, tmp_path / "out", form)
    assert report.bytes_after < report.bytes_before and report.losses
    must_be_equal(tmp_path / "out", original, form)
    assert 0.001 < report.loss.relative < (0.2 if form.startswith("int4") else 0.02)
    assert {file.name for file in original.iterdir()} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_weights_are_rounded_to_the_dtype_that_is_served(tmp_path: Path) -> None:
    original = saved("llama-gqa").path
    for dtype in ("float32", "bfloat16"):
        quantize(original, tmp_path / dtype, "int8", dtype=dtype)
        must_be_equal(tmp_path / dtype, original, "int8", dtype)
    files = [(tmp_path / dtype / "model.safetensors").read_bytes() for dtype in ("float32", "bfloat16")]
    assert files[0] != files[1]


def test_the_file_is_what_compressed_tensors_describes(tmp_path: Path) -> None:
    """Numbers of 4 bits are stored plus 8, the first in the lowest bits of a word; `safetensors` reads the file."""
    original = saved("llama-gqa").path
    quantize(original, tmp_path / "out", "int4-g32", dtype="float32")
    stored, floats = load_file(tmp_path / "out" / "model.safetensors"), load_file(original / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    words, scales = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"]
    outputs, inputs = stored[f"{stem}.weight_shape"].tolist()
    assert (outputs, inputs) == (32, 48) and words.shape == (32, 6) and scales.shape == (32, 2)
    integers = torch.stack([(words >> 4 * place) & 15 for place in range(8)], dim=2).flatten(1) - 8
    weight = integers * scales.repeat_interleave(32, dim=1)[:, :inputs]
    assert (weight - floats[f"{stem}.weight"]).norm() < 0.12 * floats[f"{stem}.weight"].norm()
    assert torch.equal(stored["lm_head.weight"], floats["lm_head.weight"])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized" and settings["triptych"] == {"quantization": "int4-g32"}
    assert settings["ignore"] == ["lm_head", "model.embed_tokens"]


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 8_000)
    shares: list[float] = []
    original = saved("llama-sharded").path
    quantize(original, tmp_path / "out", "int8", progress=lambda share, name: shares.append(share))
    files = sorted(file.name for file in (tmp_path / "out").glob("model-*"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    assert not list((tmp_path / "out").glob("pytorch_model*"))
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] < 1
    must_be_equal(tmp_path / "out", original, "int8")


def test_a_matrix_that_does_not_fill_words_stays_as_it_is(tmp_path: Path) -> None:
    """It becomes the same integers while the written folder is loaded."""
    original = copied("llama-gqa", tmp_path / "in")
    tensors = load_file(original / "model.safetensors")
    for name, tensor in tensors.items():
        if "mlp.down" in name:
            tensors[name] = tensor[:, :44].contiguous()
        elif "mlp." in name:
            tensors[name] = tensor[:44].contiguous()
    save_file(tensors, original / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "intermediate_size": 44}))
    report = quantize(original, tmp_path / "out", "int4")
    assert len(report.losses) == 12 and not any("down_proj" in name for name in report.losses)
    must_be_equal(tmp_path / "out", original, "int4")


def test_nothing_is_left_behind_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafetensorsFile, "write", full)
    with pytest.raises(ConfigError, match="out cannot be written: No space left on device"):
        quantize(saved("llama-gqa").path, tmp_path / "out", "int4")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_done_is_said_before_any_work(tmp_path: Path) -> None:
    original, packed = saved("llama-gqa").path, tmp_path / "packed"
    (tmp_path / "there").mkdir()
    packed.mkdir()
    wider = copied("llama-gqa", tmp_path / "wider")
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps({**config, "intermediate_size": 44}))
    quantize(original, tmp_path / "out", "int4")
    for given, message in (
        ((original, tmp_path / "there", "int4"), "there is there already"),
        ((original, tmp_path / "no" / "out", "int4"), "no is no folder, so out cannot be written there"),
        ((original, tmp_path / "new", "int5"), "format 'int5' cannot be written; expected one of int8, "),
        ((tmp_path / "out", tmp_path / "new", "int8"), "out is quantised already: .* int4 in groups of 64"),
        ((folders(CASES["gptq act-order"], packed)[0], tmp_path / "new", "int8"), "is quantised already: .* GPTQ int4"),
        ((wider, tmp_path / "new", "int8"), r"down_proj\.weight: found \[32, 48\], expected \[32, 44\]"),
        ((converted("llama-gqa", tmp_path), tmp_path / "new", "int8"), "is a GGUF file, whose formats are its own"),
        ((saved("xlnet").path, tmp_path / "new", "int4"), "the native kernels compute no layer of xlnet"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize(*given)
    with pytest.raises(ConfigError, match="texts are for the search of scales in 4 bits; int8 has none"):
        quantize(original, tmp_path / "new", "int8", texts=tmp_path / "texts")
    with pytest.raises(ConfigError, match="missing cannot be read"):
        quantize(original, tmp_path / "new", "int4", texts=tmp_path / "missing")
    assert not (tmp_path / "new").exists()


def test_folders_of_modules_are_copied_whatever_they_are_called(tmp_path: Path) -> None:
    original = copied("bert", tmp_path / "in")
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in MODULES]
    (original / "modules.json").write_text(json.dumps(modules))
    (original / "after" / "pooling").mkdir(parents=True)
    width = json.loads((original / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_max_tokens": True}
    (original / "after" / "pooling" / "config.json").write_text(json.dumps(pooling))
    quantize(original, tmp_path / "out", "int8")
    assert read_checkpoint(tmp_path / "out").sentences.pooling == (Pooling.MAX,)


def test_all_that_a_folder_offers_is_offered_after(tmp_path: Path) -> None:
    original = copied("bert", tmp_path / "in")
    torch.save({"weight": torch.randn(1, 32), "bias": torch.randn(1)}, original / "sparse_linear.pt")
    torch.save({"weight": torch.randn(8, 32), "bias": torch.randn(8)}, original / "colbert_linear.pt")
    offered = ("artifact.metadata", "processor_config.json", "tokenizer.model", "additional_chat_templates/use.jinja")
    for name in offered:
        (original / name).parent.mkdir(exist_ok=True)
        (original / name).write_text("{}")
    before = read_checkpoint(original).sentences
    quantize(original, tmp_path / "out", "int8")
    after = read_checkpoint(tmp_path / "out").sentences
    assert before.token_weight is not None and before.late is not None
    assert after.token_weight is not None and after.late is not None
    assert all((tmp_path / "out" / name).is_file() for name in offered)


def test_a_network_in_a_folder_of_its_own_stays_there(tmp_path: Path) -> None:
    original = tmp_path / "in"
    original.mkdir()
    copied("bert", tmp_path).rename(original / "0_Transformer")
    (original / "0_Transformer" / "vocab.txt").write_text("[PAD]")
    types = {"0_Transformer": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in types.items()]
    (original / "modules.json").write_text(json.dumps(modules))
    (original / "1_Pooling").mkdir()
    (original / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    quantize(original, tmp_path / "out", "int8")
    found = read_checkpoint(tmp_path / "out")
    assert found.sentences.pooling == (Pooling.MAX,) and found.config.stored_as
    assert sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")) == [
        *("0_Transformer/config.json", "0_Transformer/model.safetensors", "0_Transformer/vocab.txt"),
        *("1_Pooling/config.json", "modules.json"),
    ]


def test_weights_that_config_json_names_are_not_copied(tmp_path: Path) -> None:
    original, out = copied("llama-gqa", tmp_path), tmp_path / "out"
    (original / "model.safetensors").rename(original / "half.safetensors")
    config = json.loads((original / "config.json").read_text()) | {"transformers_weights": "half.safetensors"}
    (original / "config.json").write_text(json.dumps(config))
    quantize(original, out, "int8")
    must_be_equal(out, original, "int8")
    assert not (out / "half.safetensors").exists()


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    original, secret = copied("llama-gqa", tmp_path / "in"), tmp_path / "secret"
    secret.write_text("of somebody else")
    (original / "notes.txt").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"llama-gqa/notes\.txt leads out of the folder, so it is not copied"):
        quantize(original, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
    (original / "notes.txt").unlink()
    (original / "notes.txt").symlink_to("config.json")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    shutil.copytree(original, snapshot, symlinks=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "special.json").symlink_to(blobs / "abc")
    quantize(snapshot, tmp_path / "out", "int8")
    assert (tmp_path / "out" / "notes.txt").read_bytes() == (original / "config.json").read_bytes()
    assert (tmp_path / "out" / "special.json").read_bytes() == (blobs / "abc").read_bytes()


def test_what_a_folder_says_of_its_format_is_checked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(saved("llama-gqa").path, out, "int4")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["triptych"] = {"quantization": "int3"}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.triptych\.quantization: 'int3' is not served"):
        loaded(out)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts"
    file.write_text("def area(width, height):\n    return width * height\n\nimport json\nclass Reader:\n    pass\n")
    return file


@pytest.mark.parametrize("model", ["code", "normalize"])
def test_texts_say_what_errors_count(model: str, texts: Path, tmp_path: Path, packed_here: None) -> None:
    """The errors weighted by the inputs' second moments fall, though errors of weights grow."""
    original = Path(embedded_models()[model])
    plain, searched = (
        quantize(original, tmp_path / name, "int4", texts=file) for name, file in (("a", None), ("b", texts))
    )
    assert plain.loss.relative < searched.loss.relative < 1.3 * plain.loss.relative
    targets = [linear.spec.name for linear in linears(loaded(original).network) if ".layers." in linear.spec.name]
    moments = input_moments(original, texts.read_text().split("\n\n"), targets, "float32")
    assert moments.keys() == set(targets)
    library = native()
    assert isinstance(library, Library)
    if model == "code":
        weight = load_file(original / "model.safetensors")["layers.2.mlp.down_proj.weight"].float()
        errors = []
        for counts in (None, moments["decoder.layers.2.mlp.down"]):
            integers, scales = library.quantise_rows(weight, Kind.INT4, 64, counts)
            error = (integers * scales.repeat_interleave(64, dim=1) - weight).square()
            errors.append(float((error * moments["decoder.layers.2.mlp.down"]).sum()))
        assert errors[1] < 0.95 * errors[0]


def test_second_moments_are_those_of_the_inputs(tmp_path: Path, packed_here: None) -> None:
    original = Path(embedded_models()["code"])
    moments = input_moments(original, ["import json"], ["decoder.layers.0.attn.qkv"], "float32")
    llm = loaded(original, dtype="float32")
    assert llm.tokenizer is not None and llm.network.tokens is not None and llm.network.decoder is not None
    ids = torch.tensor(llm.tokenizer.encode("import json").ids)
    rows = llm.network.decoder.layers[0].attn_norms.pre(llm.network.tokens(ids).float())
    expected = rows.square().mean(0)
    assert torch.allclose(moments["decoder.layers.0.attn.qkv"], expected + 0.01 * expected.mean(), rtol=1e-4)


def test_losses_of_nothing_are_none() -> None:
    assert Report().loss.relative == 0.0
    assert math.isclose(writing.Loss(0.04, 4.0).relative, 0.1)


def test_weights_of_torch_save_become_safetensors(tmp_path: Path) -> None:
    original = copied("llama-gqa", tmp_path / "in")
    tensors = load_file(original / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t().contiguous().t()
    torch.save(tensors, original / "pytorch_model.bin")
    (original / "model.safetensors").unlink()
    quantize(original, tmp_path / "out", "int4")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    must_be_equal(tmp_path / "out", saved("llama-gqa").path, "int4")


def with_words(folder: Path) -> Path:
    """Add a tokenizer to the folder, whose words are `w0`, `w1` and so on."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(WordLevel({f"w{id}": id for id in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_each_expert_counts_what_it_reads(tmp_path: Path) -> None:
    """Its moments are those of its own rows, mixed with its layer's mean; the written integers follow them."""
    folder, theirs = with_words(copied("qwen3-moe", tmp_path)), saved("qwen3-moe").reference
    ids = [1 + place * 7 % 60 for place in range(40)]
    texts = tmp_path / "texts"
    texts.write_text(" ".join(f"w{id}" for id in ids))
    name = "decoder.layers.1.mlp.up"
    found = input_moments(folder, [texts.read_text()], [name, "decoder.layers.1.mlp.down"], "float32")
    given: list[Tensor] = []
    hook = theirs.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0]))
    theirs(torch.tensor([ids]))
    hook.remove()
    rows, experts = given[0], theirs.config.num_experts
    chosen = (rows @ theirs.model.layers[1].mlp.gate.weight.T).topk(theirs.config.num_experts_per_tok).indices
    reads = [rows[(chosen == expert).any(-1)].square() for expert in range(experts)]
    mean = torch.cat(reads).mean(0)
    own = torch.stack([(one.sum(0) + 16 * mean) / (len(one) + 16) for one in reads])
    assert torch.allclose(found[name], own + 0.01 * own.mean(-1, keepdim=True), rtol=1e-4)
    assert len({len(one) for one in reads}) > 1 and found["decoder.layers.1.mlp.down"].shape[0] == experts

    quantize(folder, tmp_path / "new", "int4-g32", texts=texts, dtype="float32")
    library, written = native(), load_file(tmp_path / "new" / "model.safetensors")
    assert isinstance(library, Library)
    for expert, counts in enumerate(found[name]):
        stored = f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"
        weight = load_file(folder / "model.safetensors")[stored]
        _, scales = library.quantise_rows(weight, Kind.INT4, 32, counts)
        assert torch.allclose(written[f"{stored}_scale"], scales)


def test_the_docs_have_the_formats_and_their_bits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quantisation.md").read_text().partition("\nFigures ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", text, re.MULTILINE)
    assert dict(rows) == {name: f"{one.bits:g}" for name, one in FORMATS.items()}
