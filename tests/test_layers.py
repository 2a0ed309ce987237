"""What may be imported from outside, torch, Ray, web libraries, and where; imports between our own: test_imports.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {str(f.relative_to(ROOT)): f for part in ("model", "service") for f in sorted((ROOT / part).rglob("*.py"))}
WEB = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "ray", "httpx", "service", "loadtest", "lab"}
_TIME_OF_DAY = (
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "datetime.datetime.now",
)
NO_TORCH = (
    "triptych.model.api.request",
    "triptych.model.config.model",
    "triptych.model.families.table.rules",
    "triptych.model.families",
    "triptych.model.checkpoint.folder",
    "triptych.model.text.tokenizer",
    "triptych.model.text.token_bytes",
    "triptych.model.text.grammar",
    "triptych.model.text.grammar_matcher",
    "triptych.model.engine.scheduling.token_constraints",
    "triptych.model.api.engine_config",
    "triptych.model.api.stats",
    "triptych.model.errors",
    "triptych.model.api.messages",
    "triptych.model.engine.scheduling.sequence",
    "triptych.model.engine.scheduling.block_manager",
    "triptych.model.engine.scheduling.scheduler",
    "triptych.model.client.admission",
    "triptych.model.client.model_table",
    "triptych.model.client.async_engine",
    "triptych.model.client.process_transport",
    "triptych.model.system.child_process",
    "triptych.model.config.sharding",
    "triptych.service.cli.main",
    "triptych.service.cli.serve",
    "triptych.service.runtimes.local",
    "triptych.service.runtimes.ray_serve.config_file",
    "triptych.service.runtimes.ray_serve.environment",
)


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """For all tests here; for those of other files it would be a million objects to collect garbage among."""
    yield
    nodes.cache_clear()


def imports(file: Path) -> Iterator[str]:
    """Full names of everything that a file imports, wherever in it."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


def packages(file: Path) -> set[str]:
    return {name.removeprefix("triptych.").partition(".")[0] for name in imports(file)}


def test_modules_are_imported_by_their_own_names() -> None:
    """`model` would be a second copy of `triptych.model`, and `triptych` itself is for users."""
    for name, file in FILES.items():
        found = set(imports(file))
        assert not {one.partition(".")[0] for one in found} & {"model", "service", "loadtest"}, name
        assert "triptych" not in found, name


def test_a_file_imports_only_what_its_layer_may() -> None:
    for name, file in FILES.items():
        used = packages(file)
        assert "transformers" not in used, name
        assert not used & {"pickle", "dill", "joblib", "cloudpickle"}, name
        if name not in {f"service/runtimes/ray_serve/{one}.py" for one in ("deployment", "session", "siblings")}:
            assert "ray" not in used, name
        if name.startswith("model/"):
            assert not used & WEB, name
        if name.startswith("model/families/"):
            assert not used & {"torch", "safetensors", "tokenizers"}, name


def test_families_define_no_class() -> None:
    for name, file in FILES.items():
        if Path(name).parent == Path("model/families"):  # a table each
            assert not [n for n in nodes(file) if isinstance(n, ast.ClassDef)], name


def test_nothing_is_unpickled() -> None:
    for name, file in FILES.items():
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save"), f"{name}:{node.lineno}"


def test_only_monotonic_clocks_decide_anything() -> None:
    """A jump of the time of day moves no deadline: it is read only for dates that are shown."""
    readers, clocks = set(), {name.rpartition(".")[2] for name in _TIME_OF_DAY}
    for name, file in FILES.items():
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "time_ns"}, name
            if isinstance(node, ast.Attribute) and node.attr in clocks and ast.unparse(node) in _TIME_OF_DAY:
                readers.add(name)
    # `created`, a chat template's date, when a model unloads, the times of spans and of vLLM's gauge of adapters;
    # how old a file is by its own times; files and batches, whose dates outlive a process; whether a key has expired,
    # the hour of usage; since when HAProxy has had a request
    shown = {
        "model/checkpoint/content.py",
        "service/batches/records.py",
        "service/batches/store.py",
        "service/lifecycle/jobs.py",
        "service/lifecycle/state.py",
        "service/chat/render_main.py",
        "service/settings/key_lines.py",
        "service/tenants/usage.py",
        "service/dialects/ollama_info.py",
        "service/observability/metric_parts.py",
        "service/observability/telemetry.py",
        "service/runtimes/ray_serve/haproxy.py",
    }
    assert readers == shown


# Files that set a function of another object, and why.
HOOKED = {
    "model/quantization/moments.py",  # it watches the experts of a loaded network, and puts their method back
    "model/system/log_lines.py",  # `sys.excepthook`: what ends the process is a line of its log
}


def hooks_set_from_outside(tree: list[ast.AST]) -> Iterator[str]:
    """Yield assignments of functions, methods and lambdas to attributes of other objects."""
    functions = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree:
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
        if isinstance(value, ast.Lambda) or name in functions:
            places = (one for one in node.targets if isinstance(one, ast.Attribute))
            yield from (ast.unparse(node) for one in places if ast.unparse(one.value) != "self")


def test_what_an_object_calls_is_in_its_constructor() -> None:
    found = {name: list(hooks_set_from_outside(nodes(file))) for name, file in FILES.items()}
    assert {name for name, hooks in found.items() if hooks} <= HOOKED


def test_control_a_hook_set_from_outside_is_found() -> None:
    source = (
        "class A:\n    def f(self, b):\n        b.find = self.f\n        self.keep = self.f\n        b.size = self.size"
    )
    assert list(hooks_set_from_outside(list(ast.walk(ast.parse(source))))) == ["b.find = self.f"]


def imported_by(modules: str, among: set[str]) -> set[str]:
    """Return which of the packages a fresh interpreter has loaded after importing the modules."""
    code = f"import sys, {modules}; print(*sorted({among!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_policy_and_the_front_import_no_torch() -> None:
    assert imported_by(", ".join(NO_TORCH), {"torch", "transformers", "ray"}) == set()


# What torch comes with, in one process, as torch takes seconds: the names that are loaded after each step.
WITH_TORCH = """
import sys
import triptych.model.llm, triptych.model.engine.loop
print(*sys.modules)
from lab.bench.gpu import check, child, peer, sweep, tests, workloads
print(*sys.modules)
from lab.bench.models import CONFIGS
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.families import config_from_raw
from triptych.model.network.weights import build_model
build_model(config_from_raw({**CONFIGS["N1"]}, None), SdpaBackend())
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def with_torch() -> list[set[str]]:
    """Modules of the engine; of the GPU bench too; and of both when a model has been built."""
    done = subprocess.run([sys.executable, "-c", WITH_TORCH], cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_engine_needs_neither_web_nor_ray(with_torch: list[set[str]]) -> None:
    assert with_torch[0] & {*WEB, "torch"} == {"torch"}


def test_a_bare_gpu_machine_runs_the_gpu_bench(with_torch: list[set[str]]) -> None:
    absent = {*WEB, "PIL", "msgspec", "llguidance", "rich", "httpx"} - {"loadtest", "lab"}
    assert with_torch[1] & {*absent, "torch"} == {"torch"}


def test_loading_a_model_does_not_load_torchs_compiler(with_torch: list[set[str]]) -> None:
    """Check that a loaded model does not import the compiler, which takes seconds."""
    assert "torch.nn" in with_torch[2]
    assert "torch._dynamo" not in with_torch[2]


def test_control_the_reader_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    import torch.nn\n    from ray import serve\n")
    assert packages(file) == {"torch", "ray"}
