"""One file for `triptych serve --config` and, as `triptych serve-config` writes it, for a Ray cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.processes import ROOT
from tests.service.test_cli import triptych_here
from triptych.model.errors import ConfigError
from triptych.model.pretrained import embedded_models
from triptych.service.runtimes.ray_serve.config_file import config_of_application, serve_config
from triptych.service.settings import sources
from triptych.service.settings.option_table import BY_NAME
from triptych.service.settings.resolve import resolve_config

FILE = """
host: 0.0.0.0
port: 8123
max-num-seqs: 8
request_timeout_s: 30
replicas: 1-2
models:
  a: /models/a
groups:
  text:
    route: /text
    replicas: 3
    max_num_seqs: 4
    models: {b: {path: here/b, device: cuda, tensor_parallel_size: 2}, c: /models/c}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "triptych.yaml"
    path.write_text(FILE)
    return path


def test_a_group_is_an_application_and_the_listener_is_the_clusters(file: Path) -> None:
    made = serve_config(file, 2)
    assert made["http_options"]["host"] == "0.0.0.0"
    assert (made["http_options"]["port"], made["http_options"]["request_timeout_s"]) == (8123, 90)
    applications = made["applications"]
    assert [(one["name"], one["route_prefix"]) for one in applications] == [
        ("triptych", "/"),
        ("triptych-text", "/text"),
    ]
    assert not any({"host", "port"} & one["args"].keys() for one in applications)
    asked = [one["deployments"][0]["ray_actor_options"] for one in applications]
    assert asked == [{"num_cpus": 2}, {"num_cpus": 2, "num_gpus": 2}]
    assert all("deployments" not in one for one in serve_config(file)["applications"])


def test_ranks_that_go_where_the_cluster_has_gpus_leave_their_resources_to_the_application(file: Path) -> None:
    """What `num_cpus` writes replaces all that the application would ask for, on a cluster that is not there yet."""
    file.write_text(FILE.replace("device: cuda, ", ""))
    assert all("deployments" not in one for one in serve_config(file)["applications"])
    with pytest.raises(ConfigError, match="model b: with --num-cpus, device must say where its ranks go: cuda or cpu"):
        serve_config(file, 2)
    file.write_text(FILE.replace("device: cuda", "device: cpu"))
    assert serve_config(file, 2)["applications"][1]["deployments"][0]["ray_actor_options"] == {"num_cpus": 2}


def test_the_gpus_of_replicas_are_written_with_their_cpus(tmp_path: Path) -> None:
    """`device: auto` is a GPU only if the file says how many a replica has: the cluster is not there yet."""
    path = tmp_path / "x.yaml"
    for text, gpus in (
        ("models: {a: /a}", None),
        ("{gpus_per_replica: 0.5, models: {a: /a}}", 0.5),
        ("{device: cuda, models: {a: /a, b: /b}}", 1),
    ):
        path.write_text(text)
        (application,) = serve_config(path, 2)["applications"]
        assert application["deployments"][0]["ray_actor_options"].get("num_gpus") == gpus
        assert config_of_application(application["args"]).scaling.gpus_per_replica == (gpus if gpus == 0.5 else None)


def test_an_application_serves_what_the_same_file_serves_without_a_cluster(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()  # without it here/b is a name of the Hub
    file.write_text(FILE.replace("here/b", str(tmp_path / "here/b")))
    found = sources.from_file(file)
    plain = resolve_config(found.models, found.settings, found.groups)
    file.write_text(FILE)
    first, text = (config_of_application(one["args"]) for one in serve_config(file)["applications"])
    assert (first.models, first.scaling, first.models_elsewhere) == (
        plain.models,
        plain.scaling,
        plain.models_elsewhere,
    )
    assert first.models_elsewhere == {"b": "/text", "c": "/text"}
    assert (text.models, text.scaling, text.settings.limits) == (
        plain.groups[0].models,
        plain.groups[0].scaling,
        plain.settings.limits,
    )
    assert text.models[0].path == str(tmp_path / "here/b")
    assert [spec.engine.max_num_seqs for spec in text.models] == [4, 4]


def test_a_file_without_models_is_the_embedded_ones(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("drain_timeout: 5\n")
    (only,) = serve_config(tmp_path / "x.yaml")["applications"]
    assert [spec.name for spec in config_of_application(only["args"]).models] == ["chat", "code", "normalize", "embed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runtime: local", "runtime: local is one process without Ray"),
        ("haproxy: 'off'", "haproxy is decided where Ray is started"),
        ("prot: 1", "key prot is not known; did you mean port?"),
        ("groups: {a: {models: {m: /m}, route: /x}, b: {models: {n: /n}, route: /x}}", "have the route /x"),
    ],
)
def test_files_for_no_cluster_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    run = triptych_here("serve-config", str(tmp_path / "x.yaml"))
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert message in run.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"application": None}, "args: application is missing: with groups"),
        ({"application": "triptych-txt"}, "expected one of triptych, triptych-text"),
        ({"port": 1}, "args: port is set by the cluster"),
    ],
)
def test_an_application_that_is_not_of_the_file_is_refused(file: Path, change: dict[str, Any], message: str) -> None:
    arguments = serve_config(file)["applications"][0]["args"] | change
    with pytest.raises(ConfigError, match=message):
        config_of_application({name: value for name, value in arguments.items() if value is not None})


def test_the_documented_file_is_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (example,) = (block for block in blocks if "groups:" in block)
    found = sources.from_mapping(yaml.safe_load(example), "example")
    config = resolve_config(found.models, found.settings, found.groups)
    (group,) = config.groups
    assert (group.route, group.scaling.min_replicas, group.scaling.max_replicas) == ("/chat", 1, 3)
    assert [spec.engine.max_num_seqs for spec in (*config.models, *group.models)] == [32, 32, 32]


# Ray changes the process that imports it: not this one.
BUILD = """
import json, sys
from triptych.service.runtimes.ray_serve.deployment import application
from ray.serve.schema import ServeDeploySchema
for one in ServeDeploySchema.model_validate(json.loads(sys.argv[1])).applications:
    built = application(one.args)._bound_deployment
    print(built.name, built._deployment_config.autoscaling_config is not None, built._deployment_config.num_replicas)
"""


def test_serve_knows_every_field(file: Path) -> None:
    run = triptych_here("serve-config", str(file), "--num-cpus", "0.5")
    assert run.returncode == 0, run.stderr
    made = json.dumps(yaml.safe_load(run.stdout))
    built = subprocess.run([sys.executable, "-c", BUILD, made], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    assert [line.split()[:2] for line in built.stdout.splitlines()] == [["triptych", "True"], ["triptych", "False"]]
    assert built.stdout.split()[-1] == "3"


def test_a_group_has_engine_settings_for_models_that_are_loaded_later_and_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(
        f"models_dir: {tmp_path}\nadmin_keys: a\nload_from: hub\nmax_num_seqs: 4\n"
        "groups:\n  chat: {max_num_seqs: 8, models: {m: /m}}\n"
    )
    found = sources.from_file(file)
    config = resolve_config(found.models, found.settings, found.groups)
    (group,) = config.groups
    assert (config.models, config.settings.models.models_dir) == ((), str(tmp_path))
    assert config.settings.models.engine.max_num_seqs == 4
    assert (group.settings.models.models_dir, group.settings.models.engine.max_num_seqs) == ("", 8)
    assert group.settings.has_admin and group.settings.models.load_from == ("hub",)


def test_a_draft_model_is_shared_by_the_models_that_name_none() -> None:
    models = {"a": {}, "b": {"draft_model": "/c"}, "c": {"num_speculative_tokens": 0}}
    text = {
        "draft_model": "/d",
        "num_speculative_tokens": 4,
        "models": {n: {"path": "/m", **m} for n, m in models.items()},
    }
    found = sources.from_mapping(text, "file")
    config = resolve_config(found.models, found.settings)
    engines = [*(spec.engine for spec in config.models), config.settings.models.engine]
    drafted = [(one.draft_model, one.draft_model_shared, one.num_speculative_tokens) for one in engines]
    assert drafted == [("/d", True, 4), ("/c", False, 4), ("/d", True, 0), ("/d", True, 4)]
    with pytest.raises(ConfigError, match="draft_model needs num_speculative_tokens"):
        resolve_config(found.models, {"draft_model": "/d"})


def test_folders_become_absolute_for_a_cluster_and_names_of_the_hub_stay(tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text("models_dir: later\nmodels: {a: here, b: 'hf:org/b@v1', c: {path: 'hf:org/c', dtype: float32}}\n")
    arguments = serve_config(file)["applications"][0]["args"]
    assert arguments["models"] == {
        "a": str(Path("here").absolute()),
        "b": "hf:org/b@v1",
        "c": {"path": "hf:org/c", "dtype": "float32"},
    }
    assert arguments["models_dir"] == str(Path("later").absolute())


def test_a_draft_model_may_be_an_embedded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = BY_NAME["draft_model"].read
    assert read("code", "draft_model") == str(embedded_models()["code"])
    assert read("./code", "draft_model") == str(tmp_path / "code")
    with pytest.raises(ConfigError, match="draft_model: found 'org/name', expected a folder or an embedded model"):
        read("org/name", "draft_model")
