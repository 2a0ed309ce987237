"""The table of settings and its sources: values, precedence, errors."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tests.service.processes import ROOT
from tests.service.support import info
from triptych.model.api.engine_config import AUTO_CACHE
from triptych.model.errors import ConfigError
from triptych.service.cli import banner
from triptych.service.cli.main import main
from triptych.service.settings import option_table, sources
from triptych.service.settings.option_table import ENGINE_OPTIONS
from triptych.service.settings.parsers import byte_size
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.service_settings import ServiceSettings


def parse(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    sources.add_arguments(parser, option_table.OPTIONS)
    return sources.from_arguments(parser.parse_args(arguments), option_table.OPTIONS)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("4096", 4096), ("1gb", 10**9)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 XB", "-1MB", "two", "9" * 400, "9000000000GiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        byte_size(text)


def test_only_what_is_given_is_set() -> None:
    assert parse() == {}
    assert parse("--min-priority", "-100") == {"min_priority": -100}
    assert parse("--port", "9", "--max-num-seqs", "4") == {"port": 9, "max_num_seqs": 4}


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("512", 512)])
def test_a_context_is_a_number_or_auto_wherever_it_is_set(text: str, expected: int | None, tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(f"max_model_len: 64\nmodels:\n  a: {{path: /a, max_model_len: {text}}}\n  b: /b\n")
    found = sources.from_file(file)
    config = resolve_config(found.models, found.settings, found.groups)
    assert {model.name: model.engine.max_model_len for model in config.models} == {"a": expected, "b": 64}
    assert parse("--max-model-len", text) == {"max_model_len": expected}
    assert sources.from_environment({"TRIPTYCH_MAX_MODEL_LEN": text}) == {"max_model_len": expected}
    for given in ({"max_model_len": 64}, {}):
        engine = resolve_config({"a": {"path": "/a"}}, given | parse("--max-model-len", text), {}).models[0].engine
        assert engine.max_model_len == expected


def test_the_banner_says_which_context_is_served_and_why() -> None:
    reason = "what the KV pool holds; the model takes 40960"
    lines = banner._model_lines(info("m", "decoder-only", max_model_len=7280, max_model_len_reason=reason))
    assert any(f"context 7280 ({reason}), 8 sequences" in line for line in lines)


def test_keys_may_be_repeated_or_listed() -> None:
    assert parse("--api-key", "a", "--api-key", "b") == {"api_keys": ("a", "b")}
    assert sources.from_environment({"TRIPTYCH_API_KEYS": "a, b"}) == {"api_keys": ("a", "b")}


EMPTY = ("", " ", ",", " , ", "a,,b", "a,")


@pytest.mark.parametrize("name", ["api_keys", "admin_keys", "api_key_file", "admin_key_file"])
def test_an_empty_security_setting_is_an_error_in_every_source(name: str, tmp_path: Path) -> None:
    is_list = name.endswith("_keys")
    for text in EMPTY if is_list else EMPTY[:2]:
        with pytest.raises(ConfigError, match=f"TRIPTYCH_{name.upper()}: found .*expected"):
            sources.from_environment({f"TRIPTYCH_{name.upper()}": text})
        with pytest.raises(ConfigError, match=f"{name}: found .*expected"):
            sources.from_mapping({name: text}, "file")
    flag = "--" + name.replace("_", "-").removesuffix("s")
    with pytest.raises(ConfigError, match="not empty" if is_list else flag):
        ServiceSettings(**parse(flag, ""))
    for value in [None, [], [""], [None], ["secret", " "], [["secret"]], [True], [1234], 1234, {"secret": 1}]:
        if is_list or not value:
            with pytest.raises(ConfigError, match=f"{name}: found ") as caught:
                sources.from_mapping({name: value}, "file")
            assert "secret" not in str(caught.value) and "1234" not in str(caught.value)


def test_a_key_of_a_file_is_its_text_alone() -> None:
    assert sources.from_mapping({"api_keys": ["0123", " b,c "]}, "file").settings == {"api_keys": ("0123", "b,c")}
    assert sources.from_mapping({"api_keys": "a, b"}, "file").settings == {"api_keys": ("a", "b")}


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_path_of_a_configuration_file_is_an_error(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_CONFIG", given)
    for arguments in (["serve"], ["serve", "--config", given]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "TRIPTYCH_CONFIG): found an empty text" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "# nothing\n", "~\n", "[]\n", "port:\n"])
def test_a_file_without_a_setting_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"is empty|expected a mapping|port: found nothing"):
        sources.from_file(file)


def test_every_option_reads_its_own_variable() -> None:
    assert sources.from_environment({"TRIPTYCH_KV_CACHE_MEMORY": "1MiB", "PATH": "x"}) == {"kv_cache_memory": 1 << 20}


def test_an_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"TRIPTYCH_PROT is not known; did you mean TRIPTYCH_PORT\?"):
        sources.from_environment({"TRIPTYCH_PROT": "1"})
    with pytest.raises(ConfigError, match=r"TRIPTYCH_CHECKPOINTS is not known$"):  # the prefix is like no other
        sources.from_environment({"TRIPTYCH_CHECKPOINTS": "1"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "x"), "--port: found 'x', expected a whole number"),
        (("--gpus-per-replica", "half"), "--gpus-per-replica: found 'half', expected a number"),
        (("--max-model-len", "all"), "--max-model-len: found 'all', expected a whole number, or auto"),
        (("--dtype", "int4"), "--dtype: found 'int4', expected one of auto, float32"),
        (("--runtime", "docker"), "--runtime: found 'docker', expected one of ray, local"),
        (("--kv-cache-memory", "lots"), "--kv-cache-memory: found 'lots', expected a size such as"),
    ],
)
def test_a_bad_value_says_where_what_and_what_was_expected(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert message in str(caught.value)


def test_a_file_holds_settings_and_models(tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text("port: 9\nkv-cache-memory: 1GiB\nmodels:\n  a: /x\n  b: {path: /y, max_num_seqs: 2}\n")
    found = sources.from_file(file)
    assert found.settings == {"port": 9, "kv_cache_memory": 1 << 30}
    assert found.models == {"a": {"path": "/x"}, "b": {"path": "/y", "max_num_seqs": 2}}
    assert found.groups == {}


GROUPS = """
max_num_seqs: 16
replicas: 2
models: {a: /a}
groups:
  chat: {replicas: 1-4, max-num-seqs: 8, models: {b: /b, c: {path: /c, max_num_seqs: 4}}}
  more: {route: /v2/more, models: {d: /d}}
"""


def test_groups_have_models_replicas_and_a_route_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(GROUPS)
    found = sources.from_file(file)
    config = resolve_config(found.models, found.settings, found.groups)
    chat, more = config.groups
    assert (config.route, chat.route, more.route) == ("/", "/chat", "/v2/more")
    assert [(one.scaling.min_replicas, one.scaling.max_replicas) for one in (config, chat, more)] == [
        (2, 2),
        (1, 4),
        (1, 1),
    ]
    sizes = {model.name: model.engine.max_num_seqs for one in (config, chat, more) for model in one.models}
    assert sizes == {"a": 16, "b": 8, "c": 4, "d": 16}
    assert config.models_elsewhere == {"b": "/chat", "c": "/chat", "d": "/v2/more"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{groups: {x: {port: 1, models: {a: /a}}}}", "groups.x: key port is not known"),
        ("{groups: {x: {route: x, models: {a: /a}}}}", "groups.x: route: found 'x', expected a path such as /chat"),
        ("{groups: {x: {}}}", "groups.x: there is no model to serve"),
        ("{groups: {x: {models: {m: /a}}}}", "two models are named m"),
        ("{groups: {x: {models: {a: /a}}, y: {route: /x, models: {b: /b}}}}", "the route /x"),
        ("{runtime: local, groups: {x: {models: {a: /a}}}}", "groups of models need --runtime ray"),
    ],
)
def test_groups_that_cannot_be_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(text)
    found = sources.from_file
    with pytest.raises(ConfigError) as caught:
        resolve_config({"m": {"path": "/m"}}, found(file).settings, found(file).groups)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "key prot is not known; did you mean port?"),
        ("models: {a: {path: /x, port: 1}}", "models.a: key port is not known"),
        ("models: {a: {max_num_seqs: 1}}", "models.a: path is missing"),
        ("models: [a]", "models: expected a mapping, found list"),
        ("a: [", "is not valid YAML"),
        ("host: 2026-13-01", "is not valid YAML: month must be"),
        ("host: !!bool x", "is not valid YAML"),
        ("port: 1\nhost: x\nport: 2", "duplicate key port, line 1"),
        ("models:\n  a: {path: x, dtype: auto, path: y}", "duplicate key path, line 2"),
        ("port: no-number", "port: found 'no-number', expected a whole number"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "triptych.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        sources.from_file(file)
    assert message in str(caught.value)


def test_a_word_that_yaml_1_1_reads_as_a_boolean_is_a_word(tmp_path: Path) -> None:
    """YAML 1.1 has `off` for false; Helm and Ray read it so, and write `false`."""
    file = tmp_path / "triptych.yaml"
    for word in ("off", "false", "'off'"):
        model = f"no: {{path: /x, weights_cache: {word}}}"
        file.write_text(f"haproxy: {word}\nprefix_caching: {word}\ncpu_binding: {word}\nmodels:\n  {model}\n")
        found = sources.from_file(file)
        assert found.settings == {"haproxy": "off", "prefix_caching": False, "cpu_binding": "off"}
        assert found.models == {"no": {"path": "/x", "weights_cache": None}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dir": False}, "state_dir: found False, expected a text"),
        ({"weights_cache": True}, "weights_cache: found True, expected a text"),
        ({"models": {False: "/x"}}, "models: found the key False, expected a name"),
        ({"port": True}, "port: found True, expected a whole number"),
    ],
)
def test_a_boolean_is_no_path_and_no_name(content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sources.from_mapping(content, "file")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("drain_timeout", -1.0), ("stall_timeout", 0.0), ("stream_interval", 11.0), ("keep_alive", 0.0)),
        *(("load_timeout", 0.0), ("embed_cache", -1), ("response_store", -1), ("max_state_bytes", -1)),
        *(("model_memory", 0), ("max_download", 0), ("scale_target", 2.0), ("scale_up_delay", -1.0)),
        *(("max_loras", 0), ("tokenizer_threads", 0), ("threads", 0), ("request_timeout_s", 0.0)),
    ],
)
def test_an_error_names_the_setting(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting} (and \w+ )?must "):
        resolve_config({"a": {"path": "/a"}}, {setting: value})


def test_each_value_of_a_repeated_flag_is_checked() -> None:
    """An empty path of a folder would be the working directory."""
    for flag in ("--lora-dir", "--lora", "--cors-origin"):
        with pytest.raises(ConfigError, match=f"{flag}: found '', expected"):
            parse(flag, "")
    with pytest.raises(ConfigError, match="expected DIR, or MODEL:DIR"):
        parse("--lora-dir", "base:")
    assert parse("--lora-dir", "a:/x", "--lora-dir", "/y") == {"lora_dir": ("a:/x", "/y")}


def test_a_missing_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        sources.from_file(tmp_path / "none.yaml")


def test_options_that_are_on_have_a_flag_to_switch_them_off() -> None:
    assert parse("--no-prefix-caching") == {"prefix_caching": False}
    assert sources.from_environment({"TRIPTYCH_PREFIX_CACHING": "off"}) == {"prefix_caching": False}
    with pytest.raises(ConfigError, match="expected true or false"):
        sources.from_environment({"TRIPTYCH_PREFIX_CACHING": "maybe"})


def test_every_variable_that_the_code_or_a_page_names_may_be_set() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text() for path in (*pages, *(ROOT / "model").rglob("*.py"))]
    named = {name for text in texts for name in re.findall(r"TRIPTYCH_[A-Z_]*[A-Z]", text)}
    of_clients = {"TRIPTYCH_API_KEY", "TRIPTYCH_ADMIN_KEY"}  # read by commands that send requests
    known = {option.variable for option in option_table.OPTIONS} | sources.OTHER_VARIABLES | of_clients
    assert {"TRIPTYCH_KERNEL_CACHE", "TRIPTYCH_PORT"} <= named <= known


def test_names_that_other_services_have_for_replicas_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "is not known; use --runtime ray --replicas N: each replica is a copy of the models on GPUs of its own"
    for name in ("data-parallel-size", "dp"):
        with pytest.raises(SystemExit):
            main(["serve", f"--{name}", "2"])
        assert f"--{name} {expected}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"TRIPTYCH_DATA_PARALLEL {expected}"):
        sources.from_environment({"TRIPTYCH_DATA_PARALLEL": "2"})
    with pytest.raises(ConfigError, match=f"key data_parallel_size {expected}"):
        sources.from_mapping({"data-parallel-size": 2}, "x.yaml")


@pytest.mark.parametrize(
    "content",
    [{"drain-timeout": 3, "drain_timeout": 4}, {"models": {"a": {"path": "/a", "max-num-seqs": 1, "max_num_seqs": 1}}}],
)
def test_the_two_spellings_of_a_setting_are_one(content: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is given twice, with - and with _"):
        sources.from_mapping(content, "file")


def test_a_model_gets_the_default_that_each_option_shows() -> None:
    [spec] = resolve_config({"a": {"path": "/a"}}, {}).models
    assert {option.name: getattr(spec.engine, option.name) for option in ENGINE_OPTIONS} == {
        option.name: option.default for option in ENGINE_OPTIONS
    }
    assert spec.engine.weights_cache == AUTO_CACHE
    [spec] = resolve_config({"a": {"path": "/a"}}, sources.from_environment({"TRIPTYCH_WEIGHTS_CACHE": "off"})).models
    assert spec.engine.weights_cache is None
