"""Train the models of this package, measure them and write their cards: `python -m lab.training [NAME ...]`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open

from lab.training import cards, evaluate, recipes
from lab.training.speech.card import write_speech_card
from lab.training.speech.evaluate import evaluate_speech
from lab.training.speech.recipe import train_speech
from triptych.model.pretrained import CHECKPOINTS

_TRAIN = {
    "code": recipes.train_code,
    "normalize": recipes.train_normalize,
    "assistant": recipes.train_assistant,
    "speech": train_speech,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.training", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*_TRAIN, []], help="which (default: all)")
    parser.add_argument("--work", type=Path, default=Path("out/pretrained"), help="where a run keeps its state")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the saved folders, write their cards")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for name in arguments.models or _TRAIN:
        if not arguments.evaluate_only:
            _TRAIN[name](arguments.work, torch.device(arguments.device))
        measure(name)


def measure(name: str) -> None:
    """Measure the saved model and write its card."""
    folder = CHECKPOINTS / name
    if name == "code":
        figures = evaluate.evaluate_code(folder)
        cards.write_code_card(folder, _parameters(folder), figures)
        print(json.dumps({"model": name, "bits_per_byte": figures.sample, "bits_per_byte_all": figures.held_out}))
    elif name == "speech":
        errors = evaluate_speech(folder)
        write_speech_card(folder, _parameters(folder), errors)
        print(json.dumps({"model": name, "word_error_rates": asdict(errors)}))
    else:
        exact = (evaluate.evaluate_normalize if name == "normalize" else evaluate.evaluate_assistant)(folder)
        write = cards.write_normalize_card if name == "normalize" else cards.write_assistant_card
        write(folder, _parameters(folder), exact)
        print(json.dumps({"model": name, "exact_match": exact}))


def _parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (not a dict)


if __name__ == "__main__":
    main()
