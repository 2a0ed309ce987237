"""Reads the classifier that the folder of an adapter has in place of the base model's (PEFT's `modules_to_save`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from triptych.model.checkpoint.tensor_files import StoredTensor, TensorReader
from triptych.model.config.formats import FLOAT
from triptych.model.errors import CheckpointError, ConfigError, listed
from triptych.model.families import family_for
from triptych.model.families.table.rules import LinearRule, Shape, TensorRule
from triptych.model.linear.base import Linear, linears
from triptych.model.network.transformer import Classifier, Transformer
from triptych.model.network.weights import stored_parts

_PART = "classifier."


def plan_head(saved: Mapping[str, StoredTensor], model: Transformer) -> dict[str, TensorRule]:
    """Return which part of a classifier each stored tensor fills, by headers alone; empty if there are none.

    Raises `ConfigError` if the base model has no classifier of these names and shapes.
    """
    if not saved:
        return {}
    head = model.config.classifier
    if head is None or head.tokens:
        raise ConfigError(
            f"modules_to_save: the adapter has {listed(saved, most=2)}, and the base model no classifier: merge the "
            "adapter (PEFT: merge_and_unload), save the model with its labels, and serve that"
        )
    family, rules = family_for(model.config), {rule.source: rule for rule in _rules(model)}
    planned = {name: rules.pop(found) for name in saved if (found := family.canonical(name)) in rules}
    others = [name for name in saved if name not in planned]
    if others:
        raise CheckpointError(
            f"modules_to_save: {listed(others, most=2)} is no part of the base model's classifier, and is not served"
        )
    parts = {_part(rule.target) for rule in planned.values()}
    absent = [name for name, rule in rules.items() if _part(rule.target) in parts]
    if absent:
        raise CheckpointError(f"modules_to_save: the saved classifier has no {listed(absent, most=2)}")
    shapes = _shapes(model.new_classifier())
    for name, rule in planned.items():
        shape, wanted = saved[name].shape, rule.shape or shapes[rule.target]
        if shape != wanted:
            raise CheckpointError(
                f"modules_to_save: {name} is {list(shape)}, the base model's is {list(wanted)}: an adapter has the "
                "labels of its base model"
            )
    return planned


def _part(target: str) -> str:
    """Return the attribute of a classifier that a tensor belongs to: out, dense, norm."""
    return target.removeprefix(_PART).partition(".")[0]


def _rules(model: Transformer) -> Iterator[TensorRule]:
    """Yield the rules of the classifier's tensors, stored as floats."""
    for rule in family_for(model.config).rules(model.config):
        if not rule.target.startswith(_PART):
            continue
        if isinstance(rule, LinearRule):
            yield from rule.tensors(FLOAT)
        elif isinstance(rule, TensorRule):
            yield rule


def _shapes(head: Classifier) -> dict[str, Shape]:
    found = {name: one.shape for linear in linears(head) for name, one in linear.tensors().items()}
    return found | {f"{_PART}norm.{name}": tuple(one.shape) for name, one in head.norm.named_parameters()}


def head_bytes(planned: Mapping[str, TensorRule], model: Transformer) -> int:
    """Return the bytes that a classifier of a plan takes in memory."""
    own = {rule.target for rule in planned.values()}
    return sum(one.nbytes for one in linears(model.new_classifier()) if one.spec.weight in own) if planned else 0


def read_head(saved: Mapping[str, StoredTensor], planned: Mapping[str, TensorRule], model: Transformer) -> Classifier:
    """Read the classifier that was planned; what the folder does not have of it is the base model's."""
    head, read = model.new_classifier(), {_part(rule.target) for rule in planned.values()}
    shapes, projections = _shapes(head), {name: one for one in linears(head) for name in one.tensors()}
    head.norm.to_empty(device=model.device).to(model.linear.dtype)
    norms = {f"{_PART}norm.{name}": one for name, one in head.norm.named_parameters()}
    with TensorReader(saved) as reader, torch.no_grad():
        for name, rule in planned.items():
            shape = shapes[rule.target]
            for into, values in stored_parts(reader, name, rule, shape, None):
                values = values.reshape(into[0].stop - into[0].start, *shape[1:])
                if not bool(values.float().isfinite().all()):
                    raise CheckpointError(f"{name}: it has numbers that are infinite or NaN")
                if rule.target in projections:
                    projections[rule.target].fill(rule.target, into, values)
                else:
                    norms[rule.target][into].copy_(values)
    for name, part in list(head.named_children()):
        if name not in read:
            setattr(head, name, getattr(model.classifier, name))
        elif isinstance(part, Linear):
            part.finish()
    return head.requires_grad_(False).eval()
