"""Checkpoint folders: those that can be served load, all others get one clear error early."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.matrix import rest_is_slow
from tests.model.checkpoints import (
    KINDS,
    copied,
    edit_json,
    edit_tensors,
    load_native,
    loaded,
    native_backends,
    prompt,
    saved,
)
from tests.model.parity import MECHANISMS, decoder_logits
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint import progress
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.stack import PositionKind
from triptych.model.engine.builder import load
from triptych.model.errors import CheckpointError, ConfigError
from triptych.model.families import family_for
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model, stored_tensors
from triptych.service.runtimes.model_reader import read_model

# Heads of pre-training, and sinusoidal tables that are stored although we compute them.
NOT_SERVED = (
    *("mask_emb", "lm_loss.", "vision_tower.", "multi_modal_projector.", "visual.", "vision_model."),
    *("connector.", "contact_head.", "embeddings.mask_token"),
)
ONE_ROW = {"embeddings.task_type_embeddings.weight"}  # texts use the first row of a table of tasks
COMPUTED = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")


def read_and_load(path: Path) -> Transformer:
    return load_model(read_checkpoint(path), SdpaBackend())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", rest_is_slow(KINDS, lambda kind: kind in (*MECHANISMS, "marian-two-vocabularies")))
def test_stored_tensors_are_the_checkpoints_own_bit_for_bit(kind: str) -> None:
    model = loaded(kind)
    family = family_for(model.config)
    originals = {family.canonical(name): tensor for name, tensor in stored(saved(kind).path).items()}
    if kind == "marian-two-vocabularies":  # a tensor stored under another of its names is read as the first name
        originals["shared.weight"] = originals.pop("encoder.embed_tokens.weight")
    ours = dict(stored_tensors(model))
    not_served = originals.keys() - ours.keys()
    assert ours.keys() <= originals.keys() and all(map(family.drops, not_served))
    sinusoidal = any(stack.position.kind is PositionKind.SINUSOIDAL for stack in model.config.stacks.values())
    computed = {name for name in originals if name in COMPUTED} if sinusoidal else set()
    passed_over = {name for name in originals if name.startswith(NOT_SERVED) or name.endswith(".inv_freq")}
    assert not_served == passed_over | computed
    for name, tensor in ours.items():
        stored_tensor = originals[name][0] if name in ONE_ROW else originals[name]
        assert tensor.shape == stored_tensor.shape, name
        assert torch.equal(tensor, stored_tensor), name


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "granitemoe"])
def test_experts_are_read_from_the_tensors_of_newer_folders_too(kind: str, tmp_path: Path) -> None:
    """`transformers` 5 keeps all experts of a layer in one tensor, and may store it so."""
    saved(kind).reference.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in stored(tmp_path))
    newer = dict(stored_tensors(read_and_load(tmp_path)))
    older = dict(stored_tensors(loaded(kind)))
    assert newer.keys() == older.keys()
    assert all(torch.equal(tensor, older[name]) for name, tensor in newer.items())


def test_an_output_of_experts_that_is_of_no_part_is_refused(tmp_path: Path) -> None:
    saved("qwen2-moe").reference.save_pretrained(tmp_path, save_original_format=False)
    name = next(name for name in stored(tmp_path) if name.endswith("experts.gate_up_proj"))
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.cat((tensors[name], tensors[name][:, :1]), 1)}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj has \d+ outputs, which .*gate_proj.* do not share evenly"):
        read_and_load(tmp_path)


def test_a_header_cannot_ask_for_the_names_of_any_number_of_experts(tmp_path: Path) -> None:
    folder = copied("mixtral", tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(10**7, 0)}))
    with pytest.raises(ConfigError, match="has 10000000 experts, of at most 4096"):
        read_checkpoint(folder)


def test_one_error_lists_all_that_is_missing_and_misshaped(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.surprise.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(97, 31)
        tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(5)

    edit_tensors(folder, spoil)
    with pytest.raises(CheckpointError) as error:
        read_and_load(folder)
    text = str(error.value)
    for offender in (
        "norm.weight",
        "layers.0.mlp.up_proj.weight",
        "lm_head.weight: found [97, 31], expected [97, 32]",
        "model.layers.1.input_layernorm.weight: found [5], expected [32]",
    ):
        assert offender in text
    assert all(word in text for word in ("missing", "misshaped")) and "surprise" not in text


def test_an_error_of_many_tensors_has_a_bounded_length(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=300)
    with pytest.raises(CheckpointError, match=r"missing: .* and \d{4} more") as error:
        read_and_load(folder)
    assert len(str(error.value)) < 600


def test_a_tensor_stored_under_both_its_names_is_refused(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(32)}))
    with pytest.raises(ConfigError, match=r"norm\.weight and (model\.)?norm\.weight are two tensors for one"):
        read_and_load(folder)


# Tensors of published folders that no network reads: `transformers` warns of them and ignores them.
LEFT_OVER = {
    "a value head": ("llama", {"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)}),
    "scales of a cache": ("llama", {f"model.layers.0.self_attn.{side}_scale": () for side in "kv"}),
    "a bias that the settings have not": ("llama", {"model.layers.0.self_attn.q_proj.bias": (32,)}),
    "another head": ("bart", {"classification_head.dense.weight": (32, 32)}),
    "observers": ("qwen2", {"model.layers.0.mlp.up_proj.activation_post_process.scale": (1,)}),
    "matrices of LoRA": ("llama", {"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 32)}),
}


@pytest.mark.parametrize("left", LEFT_OVER)
def test_tensors_that_are_left_over_are_told_and_ignored(left: str, tmp_path: Path) -> None:
    kind, shapes = LEFT_OVER[left]
    folder, expected = copied(kind, tmp_path), loaded(kind).state_dict()
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(shape) for name, shape in shapes.items()}))
    [warning] = read_checkpoint(folder).warnings
    assert warning.startswith(f"{len(shapes)} stored tensors are no part of the network") and min(shapes) in warning
    found = read_and_load(folder).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_layers_beyond_the_configured_number_are_left_over(tmp_path: Path) -> None:
    """`transformers` also loads such a folder."""
    folder = copied("llama", tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=1)
    [warning] = read_checkpoint(folder).warnings
    assert "model.layers.1.input_layernorm.weight" in warning and "more" in warning
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    rows = torch.tensor([prompt(9)])
    with torch.inference_mode():
        torch.testing.assert_close(
            decoder_logits(read_and_load(folder), rows.tolist()), theirs(input_ids=rows).logits[0], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("kind", ["llama", "bert-sequence", "t5-relu", "whisper", "gpt2", "vit", "qwen2-moe", "xlnet"])
def test_a_folder_that_transformers_has_just_written_has_nothing_left_over(kind: str) -> None:
    assert not [warning for warning in read_checkpoint(saved(kind).path).warnings if "stored tensors" in warning]


# Prefixes and infixes that trainers and compilers add to names.
WRAPPED = {
    "torch.compile": ("llama", lambda name: f"_orig_mod.{name}"),
    "torch.compile of layers": ("llama", lambda name: name.replace("layers.0.", "layers.0._orig_mod.")),
    "DataParallel": ("bert", lambda name: f"module.{name}"),
    "FSDP": ("gpt2", lambda name: "_fsdp_wrapped_module." + name.replace(".mlp.", "._fsdp_wrapped_module.mlp.")),
    "activation checkpointing": ("llama", lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp.")),
    "Lightning": ("llama", lambda name: f"model.{name}"),
    "PEFT": ("llama", lambda name: f"base_model.model.{name}"),
    "a trainer's module": ("t5-relu", lambda name: f"transformer.{name}"),
    "a base model": ("llama", lambda name: name.removeprefix("model.")),
    "several": ("bert-sequence", lambda name: f"module._orig_mod.{name}"),
    "an image model": ("vit", lambda name: f"backbone.{name}"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_names_with_what_wraps_a_model_are_read_without_it(wrapped: str, tmp_path: Path) -> None:
    kind, rename = WRAPPED[wrapped]
    folder, expected = copied(kind, tmp_path), loaded(kind).state_dict()
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    found = read_and_load(folder).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert len(read_checkpoint(folder).warnings) == len(read_checkpoint(saved(kind).path).warnings) + (
        wrapped != "a base model"
    )


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    both = {f"{side}.{name}": tensor.clone() for side in ("student", "teacher") for name, tensor in tensors.items()}
    save_file(both, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"names begin with student\..*teacher\.") as error:
        read_and_load(folder)
    assert len(str(error.value)) < 600


def test_lora_matrices_that_are_not_merged_are_named(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)

    def split(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.q_proj"
        tensors[f"{name}.base_layer.weight"] = tensors.pop(f"{name}.weight")
        tensors[f"{name}.lora_A.default.weight"] = torch.zeros(4, 32)

    edit_tensors(folder, split)
    with pytest.raises(CheckpointError, match=r"LoRA matrices that are not merged.*merge_and_unload"):
        read_and_load(folder)


@pytest.mark.parametrize("kind", ["t5-relu", "marian"])
def test_a_tied_table_stored_twice_is_read_if_equal(kind: str, tmp_path: Path) -> None:
    folder, table = copied(kind, tmp_path), loaded(kind).tokens.weight
    name = "encoder.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: table.clone()}))
    assert torch.equal(read_and_load(folder).tokens.weight, table)
    libraries = [backend.library for backend in native_backends()[:1]]
    for library in libraries:  # where the packed head is the table
        assert torch.equal(load_native(read_checkpoint(folder), library).tokens(torch.arange(len(table))), table)
    edit_tensors(folder, lambda tensors: tensors.update({name: table + 1}))
    with pytest.raises(CheckpointError, match=name):
        read_and_load(folder)
    for library in libraries:
        with pytest.raises(CheckpointError, match=name):
            load_native(read_checkpoint(folder), library)


# Buffers, version numbers, unused tables and heads of pre-training in published folders.
WITHOUT_USE = {
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    "gpt-neox": tuple(f"gpt_neox.layers.0.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    "bart": ("model.encoder.version", "model.decoder.version"),
    "m2m-100": ("model.encoder.version", "model.decoder.embed_positions.weights"),
    "pegasus": ("model.encoder.embed_positions.weight",),
    "marian": ("model.decoder.embed_positions.weight",),
    "t5-relu": ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    "bert": ("bert.embeddings.position_ids", "cls.seq_relationship.weight"),
    "roberta": ("roberta.embeddings.position_ids", "lm_head.dense.weight"),
    "distilbert": ("distilbert.embeddings.position_ids", "vocab_transform.weight"),
    "albert": ("albert.embeddings.position_ids", "predictions.dense.weight", "sop_classifier.classifier.weight"),
    "electra": ("electra.embeddings.position_ids", "discriminator_predictions.dense.weight"),
    "xlnet": ("transformer.mask_emb", "lm_loss.weight"),
    "mpnet": ("embeddings.position_ids", "lm_head.bias"),
    "deberta-v2": ("deberta.embeddings.position_ids", "lm_predictions.lm_head.bias", "mask_predictions.dense.weight"),
}


@pytest.mark.parametrize("kind", WITHOUT_USE)
def test_what_carries_nothing_is_passed_over(kind: str, tmp_path: Path) -> None:
    folder, expected = copied(kind, tmp_path), loaded(kind).state_dict()
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3) for name in WITHOUT_USE[kind]}))
    found = read_and_load(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_masks_of_truth_values_are_passed_over(tmp_path: Path) -> None:
    """As versions 4.27 to 4.30 of the library saved them; and other numbers that no network has."""
    others = {"v_head.count": torch.ones(3, dtype=torch.int16), "v_head.scale": torch.ones(2, dtype=torch.uint16)}
    for kind, mask in (("gpt2", "transformer.h.0.attn.bias"), ("gpt-neox", "gpt_neox.layers.0.attention.bias")):
        folder, expected = copied(kind, tmp_path), loaded(kind).state_dict()
        masks = {mask: torch.ones(1, 1, 8, 8, dtype=torch.bool), **others}
        edit_tensors(folder, lambda tensors, masks=masks: tensors.update(masks))  # type: ignore[misc]
        found = read_and_load(folder).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    newer = tmp_path / "newer"
    saved("qwen2-moe").reference.save_pretrained(newer, save_original_format=False)
    name = next(name for name in stored(newer) if name.endswith("experts.gate_up_proj"))
    edit_tensors(newer, lambda tensors: tensors.update({name: tensors[name].to(torch.int16)}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj: numbers of the dtype I16 are not read"):
        read_and_load(newer)


def test_gpt2_without_its_prefix_is_read(tmp_path: Path) -> None:
    """Published folders are like this."""
    folder = copied("gpt2", tmp_path)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)

    edit_tensors(folder, strip)
    expected = loaded("gpt2").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_and_load(folder).state_dict().items())


def test_norms_under_their_old_names_are_read(tmp_path: Path) -> None:
    """The first BERT folders have them."""
    folder = copied("bert", tmp_path)

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    edit_tensors(folder, age)
    expected = loaded("bert").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_and_load(folder).state_dict().items())


def test_a_folder_of_a_bare_encoder_decoder_generates_without_a_heads_bias(tmp_path: Path) -> None:
    """bart-base and bart-large are published so."""
    folder = copied("bart", tmp_path)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["final_logits_bias"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(folder, strip)
    model, whole = read_and_load(folder), loaded("bart")
    assert model.head is not None and not model.head.spec.bias
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(model.logits(hidden) + whole.head.bias, whole.logits(hidden))


@pytest.mark.parametrize(("kind", "head"), [("llama", "lm_head"), ("gpt-neox", "embed_out")])
def test_a_bare_decoder_with_an_untied_table_has_no_head(kind: str, head: str, tmp_path: Path) -> None:
    """Embedding models are published so: their token table predicts no next token."""
    folder = copied(kind, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(f"{head}.weight"))
    with pytest.raises(CheckpointError, match=f"missing: {head}.weight"):
        read_and_load(folder)
    edit_json(folder / "config.json", architectures=["LlamaModel"])
    model = read_and_load(folder)
    assert not model.config.can_generate and model.head is None
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert read_and_load(folder).config.can_generate


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"expected floating point, found model\.norm\.weight \(I32\)"):
        read_and_load(folder)


def _drop_shard(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()


def _point_outside(folder: Path) -> None:
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"})


def _truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def _garble(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"not a tensor file at all, whatever it is called")


def _empty(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (_drop_shard, "shards that are missing: model-00001"),
    "index points outside": (_point_outside, r"outside the folder: \.\./model"),
    "index holds no map": (
        lambda f: edit_json(f / "model.safetensors.index.json", weight_map=["a"]),
        "weight_map",
    ),
    "truncated": (_truncate, "not a valid safetensors file"),
    "garbage": (_garble, "not a valid safetensors file"),
    "empty": (_empty, r"model-00001-of-\d+\.safetensors is empty: copy or download it again"),
    "config is empty": (lambda f: (f / "config.json").write_text(""), r"config\.json is empty: copy or download"),
    "no config": (lambda f: (f / "config.json").unlink(), r"weights \(.*\) without config\.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold an object, found list"),
    "unknown type": (
        lambda f: edit_json(f / "config.json", model_type="rwkv"),
        "model_type 'rwkv' is not served: its recurrent layers are not computed",
    ),
    "rope scaling": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "rope type 'spiral'.* served are default, linear",
    ),
    "old rope scaling": (
        lambda f: edit_json(f / "config.json", rope_parameters=None, rope_scaling={"type": "su", "factor": 2.0}),
        "rope type 'su'",
    ),
    "rope without factor": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "yarn"}),
        "rope type 'yarn' lacks its factor",
    ),
    "rope that is text": (lambda f: edit_json(f / "config.json", rope_parameters="linear"), "must be an object"),
    "theta that is text": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "default", "rope_theta": "x"}),
        "rope_theta must be a number, found 'x'",
    ),
    "a type that is a list": (lambda f: edit_json(f / "config.json", model_type=[]), r"model_type \[\] is none of"),
    "an architecture that is a number": (
        lambda f: edit_json(f / "config.json", architectures=[1]),
        "must be a list of names",
    ),
    "labels beyond counting": (
        lambda f: edit_json(f / "config.json", architectures=["LlamaForSequenceClassification"], num_labels=10**9),
        "num_labels must be from 1 to 1000000",
    ),
    "labels without numbers": (
        lambda f: edit_json(f / "config.json", architectures=["LlamaForSequenceClassification"], id2label={"a": "b"}),
        "of the wrong kind",
    ),
    "nested beyond reading": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
    "half a character": (
        lambda f: (f / "model.safetensors.index.json").write_text(r'{"weight_map": {"a": "\ud83d.safetensors"}}'),
        "index.json is not valid JSON: .*ud83d",
    ),
    "a module of no type": (
        lambda f: (f / "modules.json").write_text('[{"type": null}]'),
        "modules.json has None; served are",
    ),
    "a length that is text": (
        lambda f: (f / "generation_config.json").write_text('{"max_new_tokens": "x"}'),
        "generation_config.json: max_new_tokens must be a number, found 'x'",
    ),
    "unknown activation": (lambda f: edit_json(f / "config.json", hidden_act="snake"), "hidden_act = 'snake'"),
    "a size that is text": (
        lambda f: edit_json(f / "config.json", hidden_size="32"),
        "hidden_size must be a whole number",
    ),
    "no heads": (lambda f: edit_json(f / "config.json", num_attention_heads=0, head_dim=8), "num_heads"),
    "heads do not divide": (lambda f: edit_json(f / "config.json", num_key_value_heads=3), "multiple of num_kv_heads"),
    "a key is missing": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "lacks 'hidden_size'"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_a_spoiled_folder_gets_one_clear_error(fault: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[fault]
    folder = copied("llama-sharded", tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as error:
        read_and_load(folder)
    assert str(error.value).startswith(f"{folder}: ") and str(error.value).count("llama-sharded") == 1
    assert "\n" not in str(error.value) and len(str(error.value)) <= 600


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_a_scale_without_a_real_root_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = copied(kind, tmp_path)
    edit_json(folder / "config.json", query_pre_attn_scalar=-4)
    with pytest.raises(ConfigError, match="query_pre_attn_scalar must be positive, found -4"):
        read_checkpoint(folder)


def test_settings_of_parts_that_a_deberta_does_not_have_are_not_refused(tmp_path: Path) -> None:
    folder = copied("deberta-v2", tmp_path)
    edit_json(folder / "config.json", conv_groups=2, conv_act="snake", pooler_hidden_size=8, pooler_hidden_act="snake")
    assert read_and_load(folder) is not None


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_checkpoint(tmp_path / "nowhere")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_large_checkpoint_shows_how_far_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines where there is no terminal, else one bar, as downloads have."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_MEGABYTE", 1.0)
    with caplog.at_level(logging.INFO, progress.__name__):
        read_and_load(saved("gpt2").path)
    read = [int(record.getMessage().split()[1].replace(",", "")) for record in caplog.records]
    assert len(read) > 10 and read == sorted(read)
    assert all("MB read" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    read_and_load(saved("gpt2").path)
    *_, last = screen.getvalue().split("\r\x1b[K")
    assert f"[{24 * '#'}]" in last and "MB read" in last and last.endswith("\n")


def test_an_error_says_which_of_several_models_it_is_about(tmp_path: Path) -> None:
    folder = copied("llama", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"^t: the tensors do not fit config\.json; missing: norm\.weight$"):
        load(ModelSpec("t", str(folder), EngineConfig()))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=rf"^t: {folder}: weights \(model\.safetensors\) without config\.json"):
        read_model(ModelSpec("t", str(folder), EngineConfig()))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_float16_cannot_hold_are_told_once(
    number: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("llama", tmp_path)

    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})
        for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
            tensors[name].view(-1)[-1] = number

    with caplog.at_level(logging.WARNING):
        read_and_load(copied("llama", tmp_path / "finite"))
        assert not caplog.records
        edit_tensors(folder, overflow)
        read_and_load(folder)
    [record] = caplog.records
    assert "llama: 2 tensors of float16 hold infinities or NaN" in record.getMessage()
    assert "model.norm.weight" in record.getMessage()
