"""The OpenAPI document and the service agree, by requests that schemathesis derives from the document.

Good, odd and bad requests on every route: none may end in a 500, in a status or content type that the document does not
name, or in a body that is not of its schema. schemathesis runs as a program: its pytest plugin is outdated.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import checkpoints
from tests.service.processes import ServiceProcess, running
from triptych.model.pretrained import embedded_models

SETTINGS = Path(__file__).with_name("schemathesis.toml")
# By default: a path, queries, a file in a form, nested objects. The ten thousand of all routes are slow.
COVERED = "^/(requests|livez|v1/models|v1/audio/transcriptions|pipeline/question-answering)"
COVERED_ALONE = f"""
[[operations]]
exclude-path-regex = '{COVERED}'
phases.coverage.enabled = false
"""
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Models such that every route has one that answers; the document's examples name three of them."""
    folder = tmp_path_factory.mktemp("models")
    models = [
        f"code={checkpoints.llama(folder / 'llama')}",
        f"normalize={embedded_models()['normalize']}",
        f"embed={checkpoints.bert(folder / 'bert')}",
        f"cls={checkpoints.bert(folder / 'classifier', classes=3)}",
    ]
    (folder / "llama" / "chat_template.jinja").write_text(CHAT)
    options = ["--runtime", request.param, "--log-format", "json", "--state-dir", str(folder / "state")]
    with running([*models, *options]) as started:
        yield started


@pytest.mark.parametrize("examples", ["1", pytest.param("10", marks=pytest.mark.slow)])
def test_every_answer_is_as_documented(service: ServiceProcess, examples: str, tmp_path: Path) -> None:
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS.read_text() + (COVERED_ALONE if examples == "1" else ""))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)]
    command += ["run", f"{service.url}/openapi.json", "--max-examples", examples]
    command += ["--phases", "examples,coverage,fuzzing", "--workers", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert re.search(r"Selected: (\d+)/\1\n\s+Tested: \1\n", result.stdout)  # every operation
    assert int(re.search(r"(\d+) generated", result.stdout)[1]) > 500
    assert "Traceback" not in service.output
    assert httpx.get(f"{service.url}/readyz").status_code == 200
