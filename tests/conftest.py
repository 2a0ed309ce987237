"""Settings for all tests.

Without a GPU, Triton's kernels run in its interpreter: it must be told before anything imports Triton. A bare GPU
machine, where `-m gpu` runs the kernels' tests, has neither httpx nor hypothesis.
"""

import functools
import gc
import inspect
import logging
import os
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest_plugins = ["tests.workers"]

# Collecting tests makes a million objects that stay: looking for garbage among them takes a fifth of the time.
gc.disable()

# Services that tests start keep nothing in the cache of the user who runs them.
os.environ["TRIPTYCH_WEIGHTS_CACHE"] = "off"

# Toys compute in one thread. Threads that collecting started would be missing in the workers, which are forked.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest puts each test's handlers on every logger that does not propagate, and torch has forty of them.
for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger) and _logger.name.startswith("torch"):
        _logger.propagate = True

# Each HTTP client reads all of the system's certificates, which takes 30 ms, and hundreds of them ask this machine
# without TLS: what was read once is every client's.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

try:
    import httpx
except ImportError:
    pass
else:
    # A client waits 5 s by default, which a machine with other work takes for a start of threads or a first request.
    _WAITS = httpx._config.DEFAULT_TIMEOUT_CONFIG  # every call's and client's default is this one object
    _WAITS.connect = _WAITS.read = _WAITS.write = _WAITS.pool = 60.0

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # The same examples each time, however slow the machine; --hypothesis-profile=default looks for others.
    settings.register_profile(
        "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    if "triton.runtime.interpreter" in sys.modules:
        _adapt(sys.modules["triton.runtime.interpreter"])
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # for objects that tests make: Python's 700 costs a twelfth of their time
    gc.enable()


def _adapt(interpreter: Any) -> None:
    """Let Triton's interpreter look up functions of its language and types of numpy once, and add products exactly.

    Looking up in each call took half of the time of the kernels' tests.
    """
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    of_any = interpreter._get_np_dtype
    of_scalar = functools.cache(of_any)

    def numpy_type(of: Any) -> Any:
        one = of.scalar
        return of_scalar(one) if type(one) is interpreter.tl.dtype else of_any(of)

    def dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """Add in float64: in float32 the number of rows may change the bits of each row."""
        if d.data.dtype != np.float32:
            return original(builder, a, b, d, *rest)
        wide = interpreter.TensorHandle(d.data.astype(np.float64), interpreter.tl.float64)
        found = original(builder, a, b, wide, *rest)
        return interpreter.TensorHandle(found.data.astype(np.float32), d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_builtin = patch
    interpreter._get_np_dtype = numpy_type


@pytest.fixture(scope="session")
def embedded_service() -> Iterator[Any]:
    """Start the embedded models and one for speech in float32; one worker runs all files that use it.

    In float32 a request gives the same output alone and among others. It runs on one core: threads that wait for each
    other take many times as long where others want the second one.
    """
    from tests.service.asking import SPEECH
    from tests.service.processes import running
    from triptych.model.pretrained import CHECKPOINTS, embedded_models

    models = embedded_models() | {"assistant": CHECKPOINTS / "assistant"}
    named = [f"{name}={folder}" for name, folder in models.items()]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with running(["--runtime", "local", "--dtype", "float32", "--admin-key", "key", *named, SPEECH]) as started:
            os.sched_setaffinity(0, cores)
            yield started
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture
def packed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the weights of models in this process, however large they are: a child process takes seconds to start."""
    monkeypatch.setattr("triptych.model.engine.packing.SMALL_BYTES", 1 << 30)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the generators, so that a test's random numbers do not depend on other tests."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the other function formats a stack for each GPU library that is not there, which takes 1.4 ms
        torch.default_generator.manual_seed(0)
