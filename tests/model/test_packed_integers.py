"""Checkpoints of packed integers (AWQ, GPTQ, compressed-tensors): read exactly, kept as stored, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.checkpoints import copied, edit_tensors, load_native, native_backends, saved
from tests.model.packers import AWQ, CASES, GPTQ, compressed, describe, folders, quantise, tensors_of
from tests.model.parity import decoder_logits, decoder_prompts
from tests.parallel.ranks import on_ranks
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint import content
from triptych.model.checkpoint.coded_layouts import E2M1Layout
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.integer_formats import matches
from triptych.model.checkpoint.layouts import IntegerLayout, Layout, pack_projections
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.config.formats import integers_in_groups
from triptych.model.engine.builder import load
from triptych.model.engine.model_info import weight_bytes
from triptych.model.engine.planning.memory_plan import plan_weights
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.families import FAMILIES
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import GivenIntegersLinear, NativeLinear
from triptych.model.native.library import Kind
from triptych.model.network.native_stack import native_linears
from triptych.model.network.packed_weights import PackedWeights
from triptych.model.network.weights import load_model

needs_native = pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
PROMPTS = decoder_prompts()
GROUPS = {"w4a16 asymmetric": 32, "w4a16": 64, "w8a8 groups": 64, "gptq": 64, "awq": 64, "awq gemv": 64}  # else 128


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_integers_become_what_they_stand_for(name: str, tmp_path: Path) -> None:
    """Torch gives the exact floats; C keeps integers, scales and offsets, or 8 bits in groups without such a format."""
    case = CASES[name]
    stored, plain = map(read_checkpoint, folders(case, tmp_path))
    ours, theirs = (load_model(one, SdpaBackend()) for one in (stored, plain))
    expected = dict(theirs.named_parameters())
    assert ours.state_dict().keys() == expected.keys()
    for parameter, value in ours.named_parameters():
        assert torch.equal(value, expected[parameter]), parameter
    if not native_backends():
        return
    library = native_backends()[0].library
    packed = load_native(stored, library)
    layers = [linear for linear in linears(packed) if ".layers." in linear.spec.name]
    kept = case.order != "shuffled" and case.group != 16
    for linear in layers:
        assert isinstance(linear, NativeLinear) and isinstance(linear, GivenIntegersLinear) == kept
        assert linear.kind is (Kind.INT4 if kept and case.bits == 4 else Kind.INT8)
        assert linear.group == (GROUPS.get(name, 128) if kept else 128)
        assert ("offset" in linear.arrays) == (kept and not case.symmetric)
    assert plan_weights(stored, packed.linear).total == weight_bytes(packed)
    exact, found = (decoder_logits(model, PROMPTS) for model in (theirs, packed))
    assert 0 < (found - exact).pow(2).mean().sqrt() < 0.03 * exact.std()


@needs_native
@torch.inference_mode()
def test_inputs_may_fill_neither_words_nor_groups(tmp_path: Path) -> None:
    stored, plain = map(read_checkpoint, folders(CASES["w4a16"], tmp_path, inner=149))
    ours, theirs = (load_model(one, SdpaBackend()).state_dict() for one in (stored, plain))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    packed, exact = load_native(stored, native_backends()[0].library), load_model(plain, SdpaBackend())
    found, expected = (decoder_logits(model, PROMPTS) for model in (packed, exact))
    assert 0 < (found - expected).pow(2).mean().sqrt() < 0.03 * expected.std()


def test_a_matrix_that_is_stored_transposed_as_floats_is_packed_as_any_other(tmp_path: Path) -> None:
    """An example is GPT-2's Conv1D."""
    case, folder = CASES["gptq"], copied("gpt2", tmp_path)
    floats = load_file(folder / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc"
    name = name if f"{name}.weight" in floats else name.removeprefix("transformer.")
    found = quantise(floats[f"{name}.weight"].T, case)

    def pack(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{name}.weight"]
        tensors.update(tensors_of(case, name, found))

    edit_tensors(folder, pack)
    describe(folder, GPTQ)
    model = load_model(read_checkpoint(folder), SdpaBackend())
    assert torch.equal(model.get_parameter("decoder.layers.0.mlp.up.weight"), found.floats)


@needs_native
def test_it_is_told_what_becomes_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def info(name: str, **settings: Any) -> tuple[str, str]:
        (tmp_path / name).mkdir()
        stored, _ = folders(CASES[name], tmp_path / name)
        caplog.clear()
        engine = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=1 << 20, max_model_len=32, **settings)
        loaded = load(ModelSpec("m", str(stored), engine))
        loaded.close()
        return loaded.info.dtype, loaded.info.dtype_reason

    assert info("awq") == ("int4", "the checkpoint stores it so")
    assert "served in" not in caplog.text
    name = "GPTQ int4 in groups of 32 in the order of activations"
    assert info("gptq act-order") == ("int8", f"the nearest to {name}, as the checkpoint stores it")
    assert (
        f"m: 4 projections are stored as {name} and served in int8 in groups of 128, "
        "each rounded by at most 1/254 of the largest in its group"
    ) in caplog.text
    assert info("w8a16", attention_backend="sdpa")[1].endswith("; stored as int8 in groups of 128")
    assert "stored as int8 in groups of 128 and served in float32, which holds them exactly" in caplog.text


@needs_native
def test_the_weights_cache_knows_how_they_were_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes with other settings are other weights."""
    monkeypatch.setattr(content, "_SETTLED_SECONDS", 0.0)
    stored, _ = folders(CASES["gptq"], tmp_path)

    def outcome() -> tuple[str, Tensor]:
        checkpoint = read_checkpoint(stored)
        linear = native_linears(checkpoint.config, torch.float32, native_backends()[0].library)
        weights = PackedWeights(WeightsCache(tmp_path / "cache", None), checkpoint, SdpaBackend(), linear)
        model = weights.load()
        return weights.outcome, decoder_logits(model, PROMPTS)

    written, mapped = outcome(), outcome()
    assert (written[0], mapped[0]) == ("written", "mapped") and torch.equal(written[1], mapped[1])
    describe(stored, {**GPTQ, "checkpoint_format": "gptq_v2"})
    other = outcome()
    assert other[0] == "written" and not torch.equal(other[1], mapped[1])


@torch.inference_mode()
def test_ranks_cut_between_groups(tmp_path: Path) -> None:
    """Half of 192 columns is three groups of 32; of three groups of 64 one rank has two."""

    def logits(folder: Path) -> Any:
        checkpoint = read_checkpoint(folder)

        @torch.inference_mode()
        def work(group: Any) -> Tensor:
            return decoder_logits(load_model(checkpoint, SdpaBackend(), LinearFactory(collective=group)), PROMPTS)

        return on_ranks(2, work)

    stored, plain = folders(CASES["w4a16 asymmetric"], tmp_path)
    for ours, theirs in zip(logits(stored), logits(plain), strict=True):
        assert torch.equal(ours, theirs)
    (tmp_path / "wide").mkdir()
    stored, plain = folders(CASES["awq"], tmp_path / "wide")
    expected = decoder_logits(load_model(read_checkpoint(plain), SdpaBackend()), PROMPTS)
    for ours in logits(stored):
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_is_left_out_stays_floats_within_a_fused_matrix_too(tmp_path: Path) -> None:
    stored, plain = folders(CASES["gptq"], tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    floats = load_file(plain / "model.safetensors")[f"{name}.weight"]

    def left_out(tensors: dict[str, Tensor]) -> None:
        for tensor in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{tensor}"]
        tensors[f"{name}.weight"] = floats

    edit_tensors(stored, left_out)
    describe(stored, {**GPTQ, "dynamic": {r"-:.*\.q_proj": {}}})
    checkpoint = read_checkpoint(stored)
    assert checkpoint.config.stored_as["decoder.layers.0.attn.qkv"].scale is None
    ours, theirs = (load_model(read_checkpoint(one), SdpaBackend()) for one in (stored, plain))
    for parameter, value in ours.named_parameters():
        assert torch.equal(value, theirs.get_parameter(parameter)), parameter


def test_a_bias_that_the_network_has_not_may_be_stored_if_it_is_zero(tmp_path: Path) -> None:
    """AutoGPTQ once wrote such biases."""
    stored, _ = folders(CASES["gptq"], tmp_path)
    name = "model.layers.0.mlp.up_proj.bias"
    expected = load_model(read_checkpoint(stored), SdpaBackend()).state_dict()
    edit_tensors(stored, lambda tensors: tensors.update({name: torch.zeros(192, dtype=torch.float16)}))
    found = load_model(read_checkpoint(stored), SdpaBackend()).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    edit_tensors(stored, lambda tensors: tensors[name].fill_(0.5))
    with pytest.raises(CheckpointError, match=f"extra: {name}"):
        load_model(read_checkpoint(stored), SdpaBackend())


PUBLISHED = {  # settings of AutoGPTQ by transformers, AutoRound, AutoAWQ and llm-compressor that change nothing
    "gptq": {
        **{"backend": "auto", "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True},
        **{"dataset": "c4", "exllama_config": {"version": 1}, "use_exllama": True, "pad_token_id": None, "amp": True},
        **{"autoround_version": "0.4.2", "iters": 1000, "nsamples": 512, "seqlen": 2048, "data_type": "int"},
    },
    "awq": {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None},
    "w4a16": {"sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": ["model.layers.0.mlp"]}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_that_change_nothing_are_known(name: str, tmp_path: Path) -> None:
    stored, _ = folders(CASES[name], tmp_path)
    expected = read_checkpoint(stored).packed
    describe(stored, {**CASES[name].settings, **PUBLISHED[name]})
    assert expected and read_checkpoint(stored).packed == expected


def test_settings_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ once wrote it."""
    for name, file, settings in (
        ("gptq", "quantize_config.json", {key: GPTQ[key] for key in ("bits", "group_size", "desc_act", "sym")}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}),
    ):
        (tmp_path / name).mkdir()
        stored, _ = folders(CASES[name], tmp_path / name)
        expected = read_checkpoint(stored).packed
        describe(stored, None)
        (stored / file).write_text(json.dumps(settings))
        assert read_checkpoint(stored).packed == expected


def mixed(*groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """Return settings with several groups of projections, each with its own format."""
    found = {}
    for number, (targets, settings) in enumerate(groups):
        group = settings["config_groups"]["group_0"]
        found[f"group_{number}"] = {**group, "targets": targets, "format": settings["format"]}
    return {**compressed("mixed-precision"), "config_groups": found}


def test_of_several_groups_the_closest_target_counts(tmp_path: Path) -> None:
    """Names precede patterns, and patterns classes; fused projections get the format that holds all parts."""
    stored, plain = folders(CASES["w4a16"], tmp_path)
    (tmp_path / "wide").mkdir()
    wide, wide_plain = folders(CASES["w8a16"], tmp_path / "wide")
    of_8_bits = ("self_attn.k_proj", "mlp.down_proj")

    def exchange(others: Path) -> Callable[[dict[str, Tensor]], None]:
        def change(tensors: dict[str, Tensor]) -> None:
            found = load_file(others / "model.safetensors")
            tensors.update(
                {name: found[name] for name in found if any(f".{stem}.weight" in name for stem in of_8_bits)}
            )

        return change

    edit_tensors(stored, exchange(wide))
    edit_tensors(plain, exchange(wide_plain))
    targets = ["re:.*mlp[.]down_proj$", "model.layers.0.self_attn.k_proj"]
    describe(stored, mixed((["Linear"], compressed()), (targets, compressed(num_bits=8, group_size=128))))
    found = read_checkpoint(stored).config.stored_as
    assert found["decoder.layers.0.mlp.down"] == integers_in_groups(8, 128, offsets=False)
    assert found["decoder.layers.0.mlp.up"] == integers_in_groups(4, 64, offsets=False)
    assert found["decoder.layers.0.attn.qkv"] == integers_in_groups(8, 64, offsets=False)
    ours, theirs = (load_model(read_checkpoint(one), SdpaBackend()).state_dict() for one in (stored, plain))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for hostile in ("re:(a+)+$", "re:(.*)*x", "re:a?a?a", "re:(?!x).*", "re:("):
        describe(stored, mixed(([hostile], compressed()), (["Linear"], compressed(num_bits=8, group_size=128))))
        with pytest.raises(ConfigError, match=r"config_groups\.group_0\.targets: .* is not served"):
            read_checkpoint(stored)
    describe(stored, mixed((["re:.*q_proj"], compressed()), (targets, compressed(num_bits=8, group_size=128))))
    with pytest.raises(ConfigError, match=r"none targets model\.layers\.0\.mlp\.gate_proj"):
        read_checkpoint(stored)


PATTERNS = (
    *(r"re:.*mlp\.(gate|up)_proj.*", r"re:.*layers\.\d+\.self_attn.(?:q|k)_proj$", "re:model.layers.[0-4].mlp"),
    *("re:.*k_proj$|.*down_proj$", "re:^layers", "re:.*[.]lay+ers[.]1*[.]", "re:", "re:(q|)model$"),
)


def test_patterns_of_targets_are_those_of_re_but_for_their_time() -> None:
    names = [f"model.layers.{layer}.{name}" for layer in (0, 11) for name in ("self_attn.k_proj", "mlp.up_proj", "mlp")]
    names += ["model", "layers.1.mlp.down_proj", "", "qmodel"]
    for pattern in PATTERNS:
        found = [matches(pattern[3:], name) for name in names]
        assert found == [bool(re.match(pattern[3:], name)) for name in names], pattern
        assert any(found), pattern
    assert not matches(".*a" * 20 + "x", "a" * 400)  # `re` would take years
    with pytest.raises(ValueError, match="more than 256 alternatives"):
        matches("(a|b)" * 9, "a")


def test_of_storages_that_cannot_be_joined_the_first_one_counts() -> None:
    """The order must not be that of a set, which differs between the processes of ranks."""
    config = read_checkpoint(saved("llama-gqa").path).config
    one, other = E2M1Layout(group=16), IntegerLayout("GPTQ", 4, 16, "qweight", "scales")
    cases: list[tuple[list[Layout], tuple[int, int]]] = [([one, other, other], (8, 32)), ([other, one, one], (8, 128))]
    for layouts, nearest in cases:
        stems = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
        stored_as, _ = pack_projections(FAMILIES["llama"], config, dict(zip(stems, layouts, strict=True)))
        assert stored_as["decoder.layers.0.attn.qkv"].nearest == nearest


@needs_native
def test_a_head_may_be_packed_too(tmp_path: Path) -> None:
    """GPTQ calls it `lm_head`; its rows fill neither words nor panels."""
    case = CASES["gptq"]
    stored, plain = folders(case, tmp_path)
    floats = load_file(plain / "model.safetensors")
    found = quantise(floats["lm_head.weight"], case)
    edit_tensors(plain, lambda tensors: tensors.update({"lm_head.weight": found.floats}))

    def pack(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors.update(tensors_of(case, "lm_head", found))

    edit_tensors(stored, pack)
    ours, theirs = (load_model(read_checkpoint(one), SdpaBackend()).state_dict() for one in (stored, plain))
    assert torch.equal(ours["head.weight"], theirs["head.weight"])
    model = load_native(read_checkpoint(stored), native_backends()[0].library)
    (head,) = (linear for linear in linears(model) if linear.spec.name == "head")
    assert isinstance(head, GivenIntegersLinear) and head.kind is Kind.INT4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**GPTQ, "bits": 3}, r"bits: 3 is not served, only 4 or 8"),
        ({**GPTQ, "bits": 4.0}, r"bits: 4\.0 is not served, only 4 or 8"),
        ({key: value for key, value in GPTQ.items() if key != "bits"}, r"bits: None is not served, only 4 or 8"),
        ({"load_in_8bit": True}, r"says bitsandbytes, but no projection is stored so"),
        (
            {**compressed("mixed-precision"), "config_groups": {"one": {"format": ["x"]}}},
            r"config_groups\.one\.format: \['x'\] is not served",
        ),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format: 'marlin' is not served, only 'gptq' or"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, r"dynamic: settings for single projections are not"),
        ({**GPTQ, "group_size": 0}, r"group_size must be a number of inputs or -1, found 0"),
        ({**GPTQ, "adapter": {"name": "lora"}}, r"unknown settings: adapter"),
        ({**GPTQ, "group_size": 128}, r"scales: found \[3, 128\], expected \[2, 128\] with qweight \[24, 128\]"),
        ({**AWQ, "dynamic": {".*up_proj": {"group_size": 32}}}, r"dynamic: settings for single projections are not"),
        ({**AWQ, "bits": 8}, r"bits: 8 is not served, only 4"),
        ({**AWQ, "version": "gemv_fast"}, r"version: 'gemv_fast' is not served, only 'gemm' or 'gemv'"),
        ({**AWQ, "checkpoint_format": "GEMV_FAST"}, r"checkpoint_format: 'gemv_fast' is not served"),
        ({**AWQ, "backend": "llm-awq"}, r"backend: 'llm-awq' is not served"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format: 'sparse-24"),
        (compressed(num_bits=3), r"weights\.num_bits: 3 is not served, only 4 or 8"),
        (compressed(type="float"), r"weights\.type: 'float' is not served, only 'int'"),
        (compressed(), r"says compressed-tensors, but no projection is stored so"),
    ],
)
def test_what_is_not_served_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    stored, _ = folders(CASES["gptq"], tmp_path)
    describe(stored, settings)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load_model(read_checkpoint(stored), SdpaBackend())
