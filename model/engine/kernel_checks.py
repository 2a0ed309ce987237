"""Has the kernels of a model checked before its weights are read; torch computes what is broken on this GPU."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from importlib.util import find_spec

import torch

from triptych.model.attention.selection import Selection
from triptych.model.config.model import ModelConfig
from triptych.model.engine.execution import static_row
from triptych.model.engine.network_plan import NetworkPlan
from triptych.model.engine.planning.cache_budget import kv_dtype
from triptych.model.engine.planning.kernels import select_kernels
from triptych.model.kernel_check.check import Check, LaunchCheck
from triptych.model.kernel_check.child import MEMORY, run_check
from triptych.model.kernel_check.memory import Memory, identity_of
from triptych.model.kernel_check.plan import planned_checks
from triptych.model.kernel_check.processes import Checker
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.float import use_cublas
from triptych.model.network import fused_ops
from triptych.model.sampling import random_sampling
from triptych.model.system.background_work import Work, in_thread
from triptych.model.system.kernel_faults import ROW_PRODUCT, SAMPLING, STATIC_ROW, Faults, step_of

logger = logging.getLogger(__name__)


def checked(plan: NetworkPlan) -> Work[NetworkPlan]:
    """Have a model's kernels checked in another process, and plan torch in the place of those that are broken."""
    if not are_checked(plan.device):
        return plan
    checker = Checker(plan.device)
    faults = yield from in_thread(lambda: find_faults(plan, checker), checker.stop)
    return without(plan, faults) if faults else plan


def are_checked(device: torch.device) -> bool:
    """Whether the kernels of a device are checked: a GPU has some if there is Triton, a CPU's are held by the tests."""
    return device.type == "cuda" and find_spec("triton") is not None


def find_faults(plan: NetworkPlan, checker: Checker) -> Faults:
    """Return which kernels of a model are broken, with the reasons; what has passed before is not checked again."""
    checks = checks_of(plan)
    if not checks:
        return {}
    memory = Memory(identity_of(plan.device))
    unknown = memory.unknown(checks)
    if not unknown:  # a compiler that was there may be missing now
        reason = run_check(LaunchCheck(), plan.device)
        return dict.fromkeys((check.part for check in checks), reason) if reason not in ("", MEMORY) else {}
    unknown = list(dict.fromkeys([LaunchCheck(), *unknown]))  # without a compiler nothing works that has passed before
    logger.info("%s: %d kernels are compared with torch on %s", plan.spec.name, len(unknown), plan.device)
    began = time.monotonic()
    outcome = checker.run(unknown)
    memory.add(outcome.passed)
    if LaunchCheck() in outcome.failed:
        outcome.failed |= dict.fromkeys(checks, outcome.failed[LaunchCheck()])
    seconds = time.monotonic() - began
    logger.info("%s: %d of %d kernels passed in %.1f s", plan.spec.name, len(outcome.passed), len(unknown), seconds)
    if outcome.unchecked:
        logger.warning("%s: some kernels were not checked: %s", plan.spec.name, outcome.unchecked)
    faults: dict[str, str] = {}
    for check, reason in outcome.failed.items():
        faults.setdefault(check.part, reason)
    return faults


def checks_of(plan: NetworkPlan) -> tuple[Check, ...]:
    """Return the checks of the kernels of a model and of its draft model."""
    networks = [(plan.checkpoint.config, plan.selection, plan.linear)]
    if plan.draft is not None:
        networks.append((plan.draft.checkpoint.config, plan.draft.selection, plan.draft.linear))
    return tuple(dict.fromkeys(check for network in networks for check in _checks(plan, *network)))


def _checks(plan: NetworkPlan, config: ModelConfig, selection: Selection, linear: LinearFactory) -> tuple[Check, ...]:
    return planned_checks(
        config,
        selection.backend,
        linear,
        pages=kv_dtype(plan.spec.engine, linear.dtype),
        block_size=plan.spec.engine.block_size,
        most_queries=min(plan.context, plan.limits.max_num_batched_tokens),
        most_keys=plan.context,
    )


def use_torch(faults: Faults) -> None:
    """Have torch compute in this whole process what every model shares and is broken on this GPU."""
    shared = {ROW_PRODUCT: use_cublas, SAMPLING: random_sampling.use_torch, STATIC_ROW: static_row.use_torch}
    for part, reason in faults.items():
        error, step = RuntimeError(reason), step_of(part)
        if part in shared:
            shared[part](error)
        elif step is not None:
            fused_ops.use_torch(step, error)


def without(plan: NetworkPlan, faults: Faults) -> NetworkPlan:
    """Return the plan with torch in the place of broken kernels; what models share is torch's in this whole process."""
    use_torch(faults)
    engine, device, draft = plan.spec.engine, plan.device, plan.draft
    if draft is not None:
        selection = select_kernels(engine, draft.checkpoint.config, device, draft.linear.dtype, faults)
        draft = replace(draft, selection=selection, linear=replace(draft.linear, faults=faults))
    selection = select_kernels(engine, plan.checkpoint.config, device, plan.linear.dtype, faults)
    return replace(plan, selection=selection, linear=replace(plan.linear, faults=faults), draft=draft)
