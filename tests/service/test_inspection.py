"""`triptych inspect` beyond its tables: JSON for programs, and a page that draws attention in a browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.engine.builder import load
from triptych.model.pretrained import embedded_models
from triptych.service.cli import inspection

pytestmark = pytest.mark.usefixtures("packed_here")

MODELS = embedded_models()
TEXT = 'the <!--<script> </script><script>document.title="broken"</script> third of march'


def test_json_has_the_figures_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    inspection.print_json("normalize", MODELS["normalize"], context=100, memory=1 << 30)
    report = json.loads(capsys.readouterr().out)
    assert report["form"] == "encoder-decoder"
    assert report["parameters"]["all"] == sum(n for part, n in report["parameters"].items() if part != "all")
    assert report["weight_bytes"]["float32"] == 4 * report["parameters"]["all"]
    assert report["kv_bytes_per_token"]["float16"] == 2 * 3 * 192 * 2
    assert report["flops_per_token"]["decoder"]["step"]["attention"] == 4 * 100 * 192 * 3
    assert report["sequences_that_fit"]["float32"] == (1 << 30) // (2 * 3 * 192 * 4 * 100)


def test_inspect_shows_memory_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"device": "cpu", "kv_cache_memory": 3 << 20}
    for name in ("code", "embed"):
        inspection.print_json(name, MODELS[name], context=100, memory=3 << 20)
        found = json.loads(capsys.readouterr().out)["cpu_memory"]
        for kept, asked in (("float32", {"dtype": "float32"}), ("int8", {"quantization": "int8"})):
            info = load(ModelSpec(name, str(MODELS[name]), EngineConfig(**settings, **asked))).info
            if info.attention_backend == "native":
                assert sum(found[kept]["weights"].values()) == info.weight_bytes
            if info.num_blocks:
                assert (found[kept]["context"], found[kept]["kv_per_token"]) == (
                    info.max_model_len,
                    info.kv_bytes_per_token,
                )
            else:
                assert found[kept]["context"] is None


def test_the_tables_say_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    inspection.show("code", MODELS["code"], context=100, memory=1 << 20)
    out = capsys.readouterr().out
    assert "longest context in 1.0 MiB of KV" in out and "all weights" in out


def test_the_page_holds_every_weight_and_no_outside_asset(tmp_path: Path) -> None:
    out = tmp_path / "heads.html"
    inspection.write_attention("normalize", MODELS["normalize"], TEXT, out)
    page = out.read_text()
    assert not re.search(r"(src|href)=|https?://|url\(|@import", page)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert "<" not in found[1]  # markup for HTML's tokenizer, whatever it stands in
    data = json.loads(found[1])
    assert data["text"] == TEXT
    for one in data["maps"]:
        size = one["layers"] * one["heads"] * len(one["queries"]) * len(one["keys"])
        assert len(base64.b64decode(one["weights"])) == size


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_head(tmp_path: Path) -> None:
    out = tmp_path / "heads.html"
    inspection.write_attention("embed", MODELS["embed"], TEXT, out)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    quiet = ["--disable-background-networking", f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=3000"]
    run = subprocess.run(
        ["chromium", *flags, *quiet, "--dump-dom", out.as_uri()], capture_output=True, text=True, timeout=240
    )
    assert run.stdout.count("<canvas") == 6 * 12
    assert run.stdout.count("<line ") > 20
    assert "<title>embed: attention</title>" in run.stdout


def test_keys_without_effect_are_named_where_a_model_is_inspected_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(MODELS["code"], tmp_path / "code"))
    raw = json.loads((folder / "config.json").read_text())
    added = {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True, "\x1b[2J": 1}
    (folder / "config.json").write_text(json.dumps({**raw, **added}))
    inspection.show("code", folder, context=100, memory=1 << 20)
    shown = "'\\x1b[2J', is_llama_config, transformers.js_config, unsloth_fixed"
    warning = f"keys of config.json that have no effect for this type: {shown}"
    assert f"warning: {warning}" in " ".join(capsys.readouterr().out.split())
    inspection.print_json("code", folder, context=100, memory=1 << 20)
    assert json.loads(capsys.readouterr().out)["warnings"] == [warning]
    load(ModelSpec("mine", str(folder), EngineConfig(device="cpu", kv_cache_memory=3 << 20)))
    assert [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()] == [
        f"mine: {warning}"
    ]
