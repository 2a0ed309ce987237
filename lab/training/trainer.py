"""The training loop of the embedded models, which trains the served Transformer itself.

As in Vaswani et al. (2017, section 5): warm-up then decay, dropout on the output of every sublayer and on the
embeddings, label smoothing, tied embeddings; and, as is usual today, AdamW and gradient clipping. Dropout is added by
forward hooks, so the served network has no code for it. A run saves its state to disk and resumes from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.config.model import ModelConfig
from triptych.model.network.build import build_model
from triptych.model.network.transformer import Transformer


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The hyperparameters of one run; the model card repeats them."""

    steps: int
    learning_rate: float
    warmup: int
    dropout: float
    label_smoothing: float
    weight_decay: float = 0.01
    clip: float = 1.0
    averaging: float = 0.99  # decay of the exponential moving average of the weights, which is the result
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then half a cosine down to a twentieth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))

    def described(self, batch: str) -> str:
        """Return the run in words, for a card; `batch` says what a step has."""
        return (
            f"{self.steps} steps of {batch}, AdamW at {self.learning_rate:g} after {self.warmup} steps of warm-up, "
            f"cosine decay, dropout {self.dropout:g}, label smoothing {self.label_smoothing:g}, weights averaged, seed "
            f"{self.seed}"
        )


def new_model(config: ModelConfig, seed: int, device: torch.device) -> Transformer:
    """Create a network with random weights: normal(0, 0.02) matrices, residual outputs scaled by depth (GPT-2)."""
    torch.manual_seed(seed)
    model = build_model(config, SdpaBackend()).to_empty(device=device)
    depth = 2 * sum(stack.num_layers for stack in config.stacks.values())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        elif name == "tokens.weight":
            nn.init.normal_(parameter, std=0.02 if config.embedding.scale == 1.0 else 1 / config.embedding.scale)
        elif name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(depth / 2) if depth else 0.02)
        else:
            nn.init.xavier_uniform_(parameter)
    return model


def add_dropout(model: Transformer, probability: float) -> None:
    """Add dropout on every sublayer's output and on the embedded tokens, active in training mode only."""

    def hook(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, probability, module.training)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in {"attn", "cross", "mlp", "tokens"}:
            module.register_forward_hook(hook)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross entropy over the targets other than -100."""
    return nn.functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing, ignore_index=-100)


def train(
    model: Transformer,
    plan: TrainingPlan,
    batches: Iterator[object],
    loss_of: Callable[[Transformer, object], Tensor],
    state_file: Path,
) -> Transformer:
    """Train by the plan, with bfloat16 products, and leave the averaged weights in `model`.

    Each step consumes one of `batches`, which must be reproducible: a resumed run skips those used before.
    """
    add_dropout(model, plan.dropout)
    optimizer = _optimizer(model, plan)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = _resume(state_file, model, optimizer, average)
    device = next(model.parameters()).device.type
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=0.2) as progress:
        task = progress.add_task("loss -", total=plan.steps, completed=first)
        saved = time.monotonic()
        model.train()
        for step in range(plan.steps):
            batch = next(batches)
            if step < first:
                continue
            torch.manual_seed(plan.seed * 1_000_003 + step)  # so that a resumed run has the same dropout
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _average(model, average, min(plan.averaging, (step + 1) / (step + 10)))
            if step % 20 == 0:
                progress.update(task, description=f"loss {loss.item():.3f}")
            progress.advance(task)
            if time.monotonic() - saved > 60:
                _save(state_file, model, optimizer, average, step + 1)
                saved = time.monotonic()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average[name])
    return model.eval()


def _optimizer(model: Transformer, plan: TrainingPlan) -> torch.optim.AdamW:
    """Create AdamW with weight decay on matrices, but not on biases, norm weights and token embeddings."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and name != "tokens.weight"]
    rest = [p for name, p in model.named_parameters() if p.dim() == 1 or name == "tokens.weight"]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)


@torch.no_grad()
def _average(model: Transformer, average: dict[str, Tensor], keep: float) -> None:
    names, parameters = zip(*model.named_parameters(), strict=True)
    torch._foreach_lerp_([average[name] for name in names], list(parameters), 1 - keep)


def _save(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, average: object, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average, "step": step}
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def _resume(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> int:
    """Load a saved state, if there is one, and return the next step; reads tensors only, no pickled objects."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    average.update(state["average"])
    return int(state["step"])
