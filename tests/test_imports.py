"""The layers of the project: which folder may import which, and that no imports form a circle. Read from the source.

Every import counts, also one inside a function or below `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("model", "service", "loadtest", "lab")

# A row is a folder or a single module, and the rows above it that it may import, so that there are no circles.
# A module belongs to the most specific row. A row that may import a folder may import its single modules.
# Names are relative to their package, or begin with another one's.
# To add a folder, add a row; to allow an import, extend a row.
MODEL = """
    errors
    config              : errors
    api                 : errors config
    system              : errors
    gguf                : errors
    text                : errors api system gguf
    vision              : errors config api
    speech/resampling
    speech/audio_file   : speech/resampling
    speech/log_mel      : errors
    families/table      : errors config
    families            : errors config families/table
    native              : errors config system
    checkpoint          : errors config api system gguf vision speech/log_mel families families/table
    speech              : api text checkpoint
    linear              : errors config system native
    cache               : errors config system
    attention           : errors config system native cache
    sampling            : errors api system native
    network             : errors config system native checkpoint families families/table linear cache attention
    parallel            : errors config api system native checkpoint families families/table linear cache attention
                          network
    inspection          : errors config api system text native checkpoint families families/table linear cache attention
                          network parallel
    engine/planning     : errors config api system checkpoint linear attention network parallel
    engine/speculation/ngrams
    engine/speculation/model_drafts
    engine/scheduling   : errors config api text engine/speculation/ngrams engine/speculation/model_drafts
    engine/execution    : errors config api system vision cache attention sampling network parallel engine/scheduling
    kernel_check        : errors config api system checkpoint linear cache attention sampling network
                          engine/execution
    engine/speculation  : errors config api text checkpoint linear cache attention sampling network engine/planning
                          engine/scheduling engine/execution
    engine              : errors config api system text vision native checkpoint families families/table linear cache
                          attention sampling network kernel_check parallel engine/planning engine/scheduling
                          engine/execution engine/speculation
    pack                : errors api checkpoint system network engine
    client              : errors api system text
    pretrained
    names               : errors gguf checkpoint pretrained
    llm_pictures        : errors api text vision checkpoint
    llm_speech          : errors api text checkpoint speech engine
    llm_calls           : errors api
    llm                 : errors api text vision checkpoint speech network engine llm_calls llm_pictures llm_speech
                          names
    quantization        : errors config api native gguf checkpoint families families/table linear attention network
                          engine engine/planning llm
"""
SERVICE = """
    settings/tenant
    settings            : settings/tenant model/errors model/api model/system model/checkpoint model/pretrained
                          model/names
    sandbox             : model/errors model/system model/text
    core/request_context : settings/tenant
    core/errors         : model/errors core/request_context
    core/context_bound  : core/errors
    chat/template_files : model/errors model/gguf model/system model/text model/checkpoint
    chat/render_pool    : sandbox
    chat/chat_template  : core/context_bound core/errors chat/template_files chat/render_pool
    core                : model/errors model/api model/config model/system model/gguf model/text model/checkpoint
                          chat/chat_template chat/template_files chat/render_pool
    images              : model/errors model/api model/text model/vision sandbox core
    schemas             : model/api settings core
    observability       : model/errors model/api model/system settings core
    tenants             : settings settings/tenant core observability
    planning/outputs    : model/errors model/api model/config model/text model/checkpoint settings core schemas
    planning            : model/errors model/api model/text model/checkpoint settings sandbox images core schemas
                          planning/outputs
    lifecycle           : model/errors model/api model/gguf model/checkpoint settings sandbox tenants images core
                          observability planning chat/render_pool
    chat                : model/errors model/api model/text settings sandbox images core schemas planning lifecycle
    http                : model/errors model/api model/text settings core schemas observability planning tenants
                          lifecycle
    dialects            : model/api model/text images core schemas planning/outputs planning lifecycle chat http
    speech              : model/errors model/api model/text model/checkpoint model/speech settings sandbox core schemas
                          observability planning lifecycle http
                          dialects
    routes              : model/errors model/api model/checkpoint model/pretrained core schemas observability tenants
                          planning/outputs planning lifecycle speech chat http dialects
    batches             : model/errors settings core schemas observability lifecycle http
    app                 : settings core observability lifecycle http speech routes batches
    runtimes            : model/errors model/api model/system model/text model/checkpoint model/client settings core
                          sandbox observability planning lifecycle chat http app
    runtimes/ray_serve  : model/errors model/api model/system model/checkpoint model/names settings sandbox core
                          observability tenants lifecycle http runtimes
    cli                 : model/errors model/config model/api model/system model/gguf model/text model/checkpoint
                          model/inspection model/speech model/engine model/engine/planning model/llm model/names
                          model/native model/pretrained model/quantization settings
                          observability core planning lifecycle chat runtimes runtimes/ray_serve app batches
"""
LOADTEST = """
    errors
    settings
    records
    workload            : errors settings
    results             : errors settings records
    generator           : settings records workload
    server              : errors settings records workload results generator
    runs                : errors settings records workload results generator server
    commands            : errors settings records results generator server runs
    __main__            : commands
"""
LAB = """
    training            : model/errors model/config model/api model/text model/vision model/speech/resampling
                          model/speech/log_mel model/families
                          model/families/table model/attention model/network model/llm model/pretrained
    faults              : loadtest/errors loadtest/settings loadtest/records loadtest/results loadtest/generator
                          loadtest/server loadtest/runs model/api model/pretrained service/settings
                          service/runtimes/ray_serve
    bench               : training model/config model/api model/system model/families model/families/table model/native
                          model/checkpoint model/linear model/cache model/attention model/network
                          model/engine/scheduling model/engine/execution model/engine
    bench/peers         : bench model/api model/system model/checkpoint
    bench/gpu           : loadtest/results bench bench/peers model/config model/api model/system model/checkpoint
                          model/linear model/cache model/attention model/network model/sampling model/kernel_check
                          model/engine/execution model/engine
    servers             : faults bench/peers
    paced_engine        : model/api model/system
    worst_bodies        :
    site                : service/app service/routes
    commands            : training faults bench bench/peers servers paced_engine worst_bodies loadtest/errors
                          loadtest/settings loadtest/records loadtest/results loadtest/generator loadtest/server
                          loadtest/runs loadtest/commands model/errors model/api model/system model/llm
                          model/quantization model/pretrained
    __main__            : commands
"""

# Pairs (importing module, imported module) and circles that still break the table and have to go.
EXCEPTIONS: set[tuple[str, str]] = set()
CIRCULAR: set[frozenset[str]] = set()


def table(**packages: str) -> dict[str, set[str]]:
    """Return what each row may import, with full names, in the order of the text."""
    rows: dict[str, set[str]] = {}
    row = ""
    for package, text in packages.items():
        for line in text.strip().splitlines():
            named, colon, allowed = line.rpartition(":")
            if colon or not line.startswith(" " * 8):
                row = f"{package}/{(named if colon else allowed).strip()}"
                rows[row] = set()
            if colon or line.startswith(" " * 8):
                full = (name if name.startswith(PACKAGES) else f"{package}/{name}" for name in allowed.split())
                rows[row] |= set(full)
    return rows


TABLE = table(model=MODEL, service=SERVICE, loadtest=LOADTEST, lab=LAB)


def imported_modules(source: str, known: Iterable[str]) -> Iterator[str]:
    """Yield those of the `known` modules that a source file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix("triptych.") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("triptych.")
            below = {alias.name: f"{module}.{alias.name}" for alias in node.names}
            names = [below[name] if below[name] in known else module for name in below]
        else:
            continue
        yield from (name for name in names if name in known)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of the packages imports, without itself."""
    files = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: set(imported_modules(file.read_text(), files)) - {name} for name, file in files.items()}


def row_of(module: str) -> str | None:
    """Return the most specific row that a module belongs to; None for the packages themselves."""
    path = module.replace(".", "/")
    while path not in TABLE:
        path, slash, _ = path.rpartition("/")
        if not slash:
            return None
    return path


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (R. Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in graph[node]:
            if following not in index:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def violations(graph: Mapping[str, Iterable[str]]) -> set[tuple[str, str]]:
    """Return the pairs (importing module, imported module) that the table does not allow."""
    found = set()
    for module, imports in graph.items():
        row = row_of(module)
        allowed = {None, row, *TABLE.get(row or "", set())}
        for other in imports:
            of_other = row_of(other)
            if of_other not in allowed and not (of_other == other.replace(".", "/") and folder_of(other) in allowed):
                found.add((module, other))
    return found


def folder_of(module: str) -> str:
    return module.rpartition(".")[0].replace(".", "/")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return this project's graph; every worker collects this file, and one runs it."""
    return import_graph(ROOT)


def test_every_module_has_a_row(graph: dict[str, set[str]]) -> None:
    assert {module for module in graph if row_of(module) is None} == set(PACKAGES)
    assert {row for row in TABLE if row not in map(row_of, graph)} == set(), "rows without modules"


def test_rows_name_only_rows_above_them() -> None:
    rows = list(TABLE)
    for at, row in enumerate(rows):
        assert TABLE[row] <= set(rows[:at]), row


def test_modules_import_only_what_their_row_allows(graph: dict[str, set[str]]) -> None:
    found = violations(graph)
    assert found - EXCEPTIONS == set(), "imports that the table does not allow"
    assert EXCEPTIONS - found == set(), "exceptions that are not needed any more: delete them"


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    found = {frozenset(circle) for circle in circles(graph)}
    assert found - CIRCULAR == set(), "circles"
    assert CIRCULAR - found == set(), "exceptions that are not needed any more: delete them"


def test_the_reader_finds_every_import(tmp_path: Path) -> None:
    """Negative control: an import of each kind, a forbidden one, and a circle of three."""
    source = (
        "from typing import TYPE_CHECKING\nimport triptych.service.app\n"
        "if TYPE_CHECKING:\n    from triptych.model import llm\n"
        "def f():\n    from triptych.model.api.request import Request\n"
    )
    known = {"service.app", "model", "model.llm", "model.api.request"}
    assert set(imported_modules(source, known)) == {"service.app", "model.llm", "model.api.request"}
    assert violations({"model.api.request": {"model.errors", "model.llm"}}) == {("model.api.request", "model.llm")}
    assert circles({"a": "b", "b": "c", "c": "a", "d": "a"}) == [["a", "b", "c"]]
