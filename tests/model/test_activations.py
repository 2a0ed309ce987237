"""Activations by their names in config.json: C and torch compute what the library's function of that name does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from tests.model.checkpoints import copied, load_native, native_backends, saved
from tests.model.parity import decoder_logits, decoder_prompts
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.layer import Activation, ExpertsConfig, MLPConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.helpers import activation
from triptych.model.native.library import ACTIVATIONS as IN_C
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.native_coverage import unsupported_feed_forward
from triptych.model.network.native_stack import NativeStack

LEARNED = ("prelu", "xielu")  # they have parameters


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - set(LEARNED)))
def test_every_name_computes_what_the_library_computes(name: str) -> None:
    x = torch.cat([torch.linspace(-30.0, 30.0, 601), torch.linspace(-2.0, 2.0, 401)])
    found = ACTIVATIONS[activation({"act": name}, "act", "")](x)
    torch.testing.assert_close(found, ACT2FN[name](x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*LEARNED, "snake", None, ["gelu"], 3])
def test_others_are_refused_by_name(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"act = .* is not served; served are gelu, gelu_10, "):
        activation({"act": name}, "act", "")


@pytest.mark.parametrize("act", sorted(set(Activation) - set(IN_C)))
def test_c_leaves_those_that_it_does_not_know_to_torch(act: Activation) -> None:
    mlp = MLPConfig(8, act)
    experts = ExpertsConfig(2, 1, mlp, renormalised=False)
    for config in (mlp, experts):
        assert unsupported_feed_forward(config) == f"the activation {act.value}, which C does not compute"


@pytest.mark.parametrize("backend", native_backends(), ids=lambda backend: backend.name)
def test_a_stack_with_a_rare_activation_is_computed_by_torch(backend: Any, tmp_path: Path) -> None:
    folder = copied("llama-gqa", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_act": "mish"}))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.decoder is not None and "mish" in str(NativeStack.unsupported(checkpoint.config.decoder))
    reference = saved("llama-gqa").reference
    theirs = type(reference).from_pretrained(folder).float().eval()
    prompts = decoder_prompts()
    with torch.inference_mode():
        expected = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in prompts])
    found = decoder_logits(load_native(checkpoint, backend.library), prompts)
    assert (found - expected).abs().max().item() < 1e-4
