"""The trainer over a few steps: it learns, resumes, and what it saves can be served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.training import pairs, recipes, trainer, vocabulary
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.families import config_from_raw
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_model, stored_tensors

CPU = torch.device("cpu")
PLAN = trainer.TrainingPlan(steps=12, learning_rate=3e-3, warmup=3, dropout=0.1, label_smoothing=0.1)
RAW = {**recipes.CODE, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def batches() -> Iterator[torch.Tensor]:
    documents = [[(start + step) % 60 for step in range(40)] for start in range(60)]
    return recipes._blocks(documents, 17, 8, seed=0)


def trained(plan: trainer.TrainingPlan, state: Path) -> tuple[Transformer, list[float]]:
    model = trainer.new_model(config_from_raw(RAW), plan.seed, CPU)
    losses: list[float] = []

    def loss_of(model: Transformer, batch: object) -> torch.Tensor:
        loss = recipes._language_model_loss(model, batch)
        losses.append(loss.item())
        return loss

    return trainer.train(model, plan, batches(), loss_of, state), losses


def test_the_loss_falls(tmp_path: Path) -> None:
    _, losses = trained(replace(PLAN, steps=60), tmp_path / "state")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(PLAN, tmp_path / "whole")
    clock = iter(range(0, 100_000, 61))  # every step is a minute later: each is saved
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(trainer, "_average", _failing_at(7, trainer._average))
    with pytest.raises(KeyboardInterrupt):
        trained(PLAN, tmp_path / "broken")
    monkeypatch.undo()
    resumed, losses = trained(PLAN, tmp_path / "broken")
    assert 0 < len(losses) < PLAN.steps
    for name, parameter in resumed.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=0, atol=1e-6)


def _failing_at(step: int, function):  # type: ignore[no-untyped-def]
    calls = iter(range(1_000))

    def wrapped(*arguments):  # type: ignore[no-untyped-def]
        if next(calls) == step:
            raise KeyboardInterrupt
        return function(*arguments)

    return wrapped


def test_dropout_is_there_in_training_and_gone_after_it() -> None:
    model = trainer.new_model(config_from_raw(RAW), 0, CPU)
    batch = next(batches())
    plain = recipes._language_model_loss(model.eval(), batch)
    trainer.add_dropout(model, 0.5)
    assert torch.equal(recipes._language_model_loss(model.eval(), batch), plain)
    torch.manual_seed(0)
    assert not torch.allclose(recipes._language_model_loss(model.train(), batch), plain)


@pytest.mark.parametrize("raw", [recipes.CODE, recipes.NORMALIZE], ids=["code", "normalize"])
def test_what_is_saved_is_loaded_again(raw: dict[str, object], tmp_path: Path) -> None:
    model = trainer.new_model(config_from_raw(raw), 0, CPU)
    rng = random.Random(0)
    tokenizer = vocabulary.normalize_tokenizer([pairs.sample(rng, held_out=False) for _ in range(50)], 400)
    folder = recipes.save(tmp_path / "saved", model, raw, {"do_sample": False}, tokenizer)
    loaded = load_model(read_checkpoint(folder), SdpaBackend())
    for (name, ours), (_, theirs) in zip(stored_tensors(model), stored_tensors(loaded), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_the_rate_warms_up_then_decays() -> None:
    rates = [PLAN.rate(step) for step in range(PLAN.steps)]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 0.15 * PLAN.learning_rate


def test_padding_is_excluded_from_the_loss() -> None:
    model = trainer.new_model(config_from_raw(recipes.NORMALIZE), 0, CPU).eval()
    short, long = ([5, 6, 7], [8, 9, 1]), ([5, 6, 7], [8, 9, 10, 11, 1])
    alone = recipes._translation_loss(model, recipes._pad_batch([short]))
    both = recipes._translation_loss(model, recipes._pad_batch([short, long]))
    other = recipes._translation_loss(model, recipes._pad_batch([long]))
    assert both.item() == pytest.approx((3 * alone.item() + 5 * other.item()) / 8, abs=1e-4)
