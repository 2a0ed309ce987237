"""The offline bench: its work, its rooflines, and one run of it on a model that is small enough."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench import roofline, vocabularies
from lab.bench.batches import QUICK, BenchRequest, Scale, Workload, workloads
from lab.bench.host import step_milliseconds
from lab.bench.models import CONFIGS, built
from lab.bench.ours import Ours
from lab.bench.peers import PEERS, load
from lab.bench.roofline import Ceilings, Costs, ExpertCosts, Roofline
from lab.commands.main import main
from lab.commands.offline import Bench
from lab.training.corpus import held_out_sample
from tests.lab.bench_models import TOWERS, small_models
from triptych.model.api.engine_config import EngineConfig
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.families import FAMILIES
from triptych.model.families.table.raw_config import Settings
from triptych.model.native.library import Library, native
from triptych.model.network.build import build_model
from triptych.model.pretrained import embedded_models


@pytest.mark.parametrize("form", "DENSV")
def test_work_is_the_same_for_a_seed_and_other_for_another(form: str) -> None:
    assert workloads(form, 1000, Scale()) == workloads(form, 1000, Scale())
    assert workloads(form, 1000, Scale()) != workloads(form, 1000, Scale(seed=1))
    for workload in workloads(form, 1000, QUICK):
        assert all(100 <= token < 1000 for ask in workload.asks for token in ask.ids)
        assert (workload.output_tokens > 0) == (form not in "NV")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_costs_are_its_matrices(name: str) -> None:
    config = FAMILIES[CONFIGS[name]["model_type"]].config(Settings(CONFIGS[name]), None)
    costs = Costs.of(config)
    matrices = {
        parameter: tensor.numel()
        for parameter, tensor in build_model(config, SdpaBackend()).named_parameters()
        if tensor.ndim == 2
        and ("vision.layers." if config.joint else ".layers.") in parameter
        and not parameter.endswith(".convolution")
    }
    cross = sum(size for parameter, size in matrices.items() if ".cross.kv." in parameter)
    assert costs.cross == cross
    assert costs.encoder + costs.weights_read(10**6) - costs.head == sum(matrices.values()) - cross


@pytest.mark.parametrize("name", TOWERS)
def test_vectors_of_pictures_are_those_of_the_peer(name: str, tmp_path: Path) -> None:
    with small_models():
        path = built(name, tmp_path)
    ours = Ours(path, EngineConfig(dtype="float32", prefix_caching=False))
    peer = load("transformers", path, {"dtype": "float32", "form": "V"})
    pictures = [(100,), (101,)]
    for found, wanted in zip(ours.embed(pictures), peer.embed(pictures), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert ours.run(workloads("V", 1000, Scale(at_most=3))[1]).seconds > 0


def test_a_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    costs = Costs(encoder=0, decoder=90, head=10, cross=0, kv={None: 2, 50: 1})
    roofline = Roofline(
        costs, Ceilings(bytes_per_second=1000.0, flops_per_second=10_000.0), weight_bytes=2.0, kv_bytes=1.0
    )
    assert roofline.step(1, [100]) == pytest.approx((200 + 2 * 100 + 50) / 1000)
    assert roofline.step(2, [100, 30]) == pytest.approx((200 + 2 * 130 + 50 + 30) / 1000)
    assert roofline.step(1000, []) == pytest.approx(2 * 1000 * 100 / 10_000)
    recurrent = replace(roofline, costs=replace(costs, state_bytes=30))
    assert recurrent.step(1, [100]) == pytest.approx(roofline.step(1, [100]) + 2 * 30 / 1000)  # read, and written
    mixed = replace(roofline, costs=replace(costs, experts=(ExpertCosts(count=4, per_token=2, elements=20),)))
    assert mixed.step(1, []) == roofline.step(1, [])  # 40 of them are the token's two experts
    assert mixed.step(2, []) == pytest.approx((200 + 2.0 * 20) / 1000)  # one more, as two of each token's four may meet
    recurrent = replace(roofline, costs=replace(costs, state_bytes=5))
    assert recurrent.step(2, [1, 1]) == pytest.approx(roofline.step(2, [1, 1]) + 2 * 2 * 5 / 1000)  # read and written
    two = Workload("w", (BenchRequest((7,) * 50, 1), BenchRequest((7,) * 30, 2)))
    prefill = 2 * 80 * 90 / 10_000
    assert roofline.workload(two) == pytest.approx(prefill + roofline.step(2, [50, 30]) + roofline.step(1, [31]))


def test_a_ceiling_is_that_of_the_fastest_kernel_that_takes_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a CPU that has int8 products but emulates torch's bfloat16."""
    seconds = {"torch float32": 4.0, "native float32": 5.0, "torch bfloat16": 50.0, "native bfloat16": 3.0}
    monkeypatch.setattr(roofline, "_best", lambda work: seconds.get(work, 0.5))
    monkeypatch.setattr(roofline, "_kernels", lambda name: {one: one for one in (*seconds, f"native {name}")})
    assert Ceilings.measure("bfloat16").kernel == "native bfloat16"
    int8 = Ceilings.measure("int8")
    assert int8.kernel == "native int8"
    assert int8.flops_per_second == 6 * Ceilings.measure("bfloat16").flops_per_second


def test_a_format_is_multiplied_by_every_kernel_of_it_and_of_wider_ones() -> None:
    found = roofline._kernels("int8")
    assert set(found) - {"native int8"} == set(roofline._kernels("bfloat16")) > set(roofline._kernels("float32"))
    for name in found.keys() & {"torch float32", "native int8"}:
        product = found[name]()
        assert isinstance(product, torch.Tensor) and product[0, 0].item() == pytest.approx(roofline._SIZE, rel=0.01)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SIZE", 512)
    monkeypatch.setattr(roofline, "_READ_BYTES", 16 << 20)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With N1 in it, whose tokenizer is trained on a short text."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabularies, "training_texts", lambda: [held_out_sample()])
        built("N1", folder)
    return folder


def test_a_benchmark_model_is_written_once_and_loads(cache: Path) -> None:
    [folder] = cache.iterdir()
    assert read_checkpoint(folder).config.form == "encoder-only"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert built("N1", cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_steps_of_more_sequences_than_an_engine_takes_are_left_out() -> None:
    ours = Ours(embedded_models()["code"], EngineConfig(max_num_seqs=2, max_model_len=64))
    found = ours.step_seconds([1, 2, 3], context=16, steps=2)
    assert {batch: len(seconds) for batch, seconds in found.items()} == {1: 2, 2: 2}


def test_the_hollow_model_measures_steps() -> None:
    assert 0 < step_milliseconds(4, context=16, steps=8) < 1000


@pytest.mark.usefixtures("packed_here")
def test_every_run_computes_its_prompts() -> None:
    """Check that a workload's runs have the same prompts, and that no peer caches them."""
    names = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "auto", "attention_backend": "auto"}
    scale = {"models": None, "quick": False, "lengths": 1.0, "seed": 0, "requests": None}
    settings = Bench(Namespace(**names, **scale))._settings(None)
    ours = Ours(embedded_models()["code"], EngineConfig(**settings))
    engine = ours.loaded.generate
    assert engine is not None
    for name in range(2):
        engine.add(ours._request(name, BenchRequest(tuple(range(100, 200)), 1), beams=1))
        _, stats = engine.step()
        assert stats is not None and stats.num_tokens == 100
        assert not engine.has_work


def test_rows_are_written_as_they_come_and_a_peer_without_the_form_has_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number_format = "int8" if isinstance(native(), Library) else "float32"
    chosen = ["--quantization", "int8"] if number_format == "int8" else ["--dtype", "float32"]
    monkeypatch.setitem(PEERS, "ctranslate2", replace(PEERS["ctranslate2"], packages=()))
    written = tmp_path / "rows.jsonl"
    written.write_text("an earlier run's\n")
    options = ["--requests", "2", "--runs", "1", "--cache", str(cache), "--json", str(written)]
    with pytest.raises(SystemExit) as ended:
        main(["offline", "--models", "N1", "--peer", "ctranslate2", *chosen, *options])
    assert ended.value.code in (0, None)
    earlier, *others = written.read_text().splitlines()
    assert earlier == "an earlier run's"
    lines = [json.loads(line) for line in others]
    rows = [found for line in lines for found in line["rows"]]
    assert [(found["engine"], found["workload"], found["unable"]) for found in rows] == [
        ("ctranslate2", "", "no encoders"),
        ("triptych", "2 texts", None),
    ]
    row = rows[1]
    assert row["model"] == "N1" and row["rate"] > 0 and len(row["runs"]) == 1
    assert row["of_roofline"] == pytest.approx(row["roofline_seconds"] / row["seconds"])
    if number_format == "int8":
        assert 0.99 < row["cosine"] < 0.9999999  # int8 against float32
    assert all(line["settings"]["requests"] == 2 and line["machine"]["commit"] for line in lines)
    shown = capsys.readouterr().out
    assert "-: no encoders" in shown
    found = json.loads(shown.splitlines()[-1])  # the last line has all of it
    assert found["rows"] == rows and found["machine"]["threads"] > 0
    assert found["ceilings"].keys() == {number_format} and found["ceilings"][number_format]["kernel"]
