"""Models by their name on the Hub, from a hub that runs here."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import checkpoints
from tests.engine.test_lora import folders
from tests.model.gguf_files import converted
from tests.model.hub import Files, Hub, running

ROOT = Path(__file__).parents[2]
RESOLVE = """
import json, sys
from triptych.model.checkpoint import hub
from triptych.model.errors import ConfigError
found = []
for name, pickle in json.loads(sys.argv[1]):
    try:
        folder = hub.local_folder(name, pickle=pickle)
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
        found.append([hub.pinned(name, pickle=pickle), files])
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A small encoder, as a repository has it: with files that nothing here reads."""
    folder = checkpoints.bert(tmp_path_factory.mktemp("hub") / "bert")
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    return found | {"README.md": b"# A model", "onnx/model.onnx": bytes(20_000), "tf_model.h5": bytes(20_000)}


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    with running() as started:
        yield started


class Client:
    """Processes with a cache of their own: the library reads its settings when it is imported."""

    def __init__(self, url: str, cache: Path) -> None:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = {**plain, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def run(self, *command: str, **changes: str) -> str:
        environment = {**self.environment, **changes}
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Fatal" not in done.stderr, done.stderr
        return done.stdout

    def resolve(self, name: str, **changes: str) -> Any:
        """What a name stands for now, with the files of its folder; or the error."""
        return self.resolve_each((name, True), **changes)[0]

    def resolve_each(self, *asked: tuple[str, bool], **changes: str) -> list[Any]:
        """The same of names in one process, each with whether pickles are read."""
        found: list[Any] = json.loads(self.run("-c", RESOLVE, json.dumps(asked), **changes))
        return found


def test_only_the_files_that_are_read_are_downloaded_and_once(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    served, url = hub
    commit = served.publish("org/bert", files)
    client = Client(url, tmp_path)
    read = sorted(files.keys() - {"onnx/model.onnx", "tf_model.h5"})
    assert client.resolve("hf:org/bert") == [f"hf:org/bert@{commit}", read]
    asked = served.requests.copy()
    assert not [name for name in asked if name.split()[1] not in read]
    assert client.resolve("hf:org/bert") == [f"hf:org/bert@{commit}", read]
    assert served.requests == asked  # all of it came from the cache
    assert client.resolve("hf:org/bert", HF_HUB_OFFLINE="1") == [f"hf:org/bert@{commit}", read]


def test_a_revision_that_moves_is_followed_and_a_pinned_one_is_not(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    served, url = hub
    first = served.publish("org/bert", files)
    client = Client(url, tmp_path)
    pinned = client.resolve("hf:org/bert")[0]
    second = served.publish("org/bert", files | {"extra.json": b"{}"})
    tagged = served.publish("org/bert", files | {"extra.json": b"[]"}, "v1.0")
    assert pinned == f"hf:org/bert@{first}"
    found = client.resolve_each(("hf:org/bert", True), (pinned, True), ("hf:org/bert@v1.0", True))
    assert [name for name, _ in found] == [f"hf:org/bert@{second}", pinned, f"hf:org/bert@{tagged}"]
    assert ["extra.json" in there for _, there in found] == [True, False, True]


def test_pickled_weights_are_taken_where_there_are_no_others(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    served, url = hub
    (tmp_path / "w.safetensors").write_bytes(files["model.safetensors"])
    torch.save(load_file(tmp_path / "w.safetensors"), tmp_path / "w.bin")
    old = {name: data for name, data in files.items() if name != "model.safetensors"}
    served.publish("org/old", old | {"pytorch_model.bin": (tmp_path / "w.bin").read_bytes()})
    served.publish("org/projected", files | {"2_Dense/config.json": b"{}", "2_Dense/pytorch_model.bin": b"x"})
    client = Client(url, tmp_path / "cache")
    asked = [(name, pickle) for name in ("hf:org/old", "hf:org/projected") for pickle in (False, True)]
    found = client.resolve_each(*asked)
    assert ["pytorch_model.bin" in there for _, there in found[:2]] == [False, True]
    assert ["2_Dense/pytorch_model.bin" in there for _, there in found[2:]] == [False, True]
    projections = {"sparse_linear.pt": b"x", "colbert_linear.pt": b"x"}
    served.publish("org/m3", files | projections | {"artifact.metadata": b"{}"})
    for pickle in (False, True):
        [(_, there)] = client.resolve_each(("hf:org/m3", pickle))
        assert ({*projections} <= {*there}) is pickle and "artifact.metadata" in there
    served.requests.clear()
    served.publish("org/both", files | {"pytorch_model.bin": b"never read"})
    assert "pytorch_model.bin" not in client.resolve("hf:org/both")[1]
    assert not [name for name in served.requests if "pytorch_model" in name]


def test_weights_of_other_names_are_downloaded_where_the_folder_names_them(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    served, url = hub
    bare = {name: data for name, data in files.items() if name != "model.safetensors"}
    config = json.loads(files["config.json"])
    others = {"half.safetensors": b"x", "other.safetensors": b"x"}

    def index(*names: str) -> bytes:
        return json.dumps({"weight_map": dict(zip("abc", names, strict=False))}).encode()

    for named in ("half.safetensors", "half.safetensors.index.json"):
        said = json.dumps(config | {"transformers_weights": named}).encode()
        more = {"half.safetensors.index.json": index("half.safetensors", "../x.safetensors", "a\0b.safetensors")}
        served.publish(f"org/{named}", bare | others | more | {"config.json": said})
    served.publish("org/parts", bare | others | {"model.safetensors.index.json": index("half.safetensors")})
    shards = {"pytorch_model_1.bin": b"x", "other.bin": b"x"}
    served.publish("org/bins", bare | shards | {"pytorch_model.bin.index.json": index("pytorch_model_1.bin")})
    client = Client(url, tmp_path)
    for pickle in (False, True):
        [(_, there)] = client.resolve_each(("hf:org/bins", pickle))
        assert ("pytorch_model_1.bin" in there) is pickle and "other.bin" not in there
    asked = [(f"hf:org/{name}", True) for name in ("half.safetensors", "half.safetensors.index.json", "parts")]
    for _, there in client.resolve_each(*asked):
        assert "half.safetensors" in there and "other.safetensors" not in there


def test_a_connection_that_is_cut_is_continued(hub: tuple[Hub, str], tmp_path: Path) -> None:
    """The library keeps what came by its chunks of 10 MiB."""
    served, url = hub
    weights = os.urandom(12 << 20)
    served.publish("org/large", {"config.json": b"{}", "model.safetensors": weights})
    served.cut["model.safetensors"] = 11 << 20
    Client(url, tmp_path).resolve("hf:org/large")
    assert served.ranges == [f"bytes={10 << 20}-"]
    [file] = tmp_path.glob("hub/*/snapshots/*/model.safetensors")
    assert file.read_bytes() == weights


NOT_HAD = {
    "hf:org/none": "hf:org/none: no such repository, or a private one and HF_TOKEN gives no access",
    "hf:org/bert@v9": "hf:org/bert@v9: the repository has no revision 'v9'",
    "hf:bert": "hf:bert: expected ORGANISATION/NAME",
    "hf:../../etc/passwd": "expected ORGANISATION/NAME",
    "hf:org/gated": "hf:org/gated: its authors grant access first; set HF_TOKEN",
}


def test_what_cannot_be_had_is_said_plainly(hub: tuple[Hub, str], files: Files, tmp_path: Path) -> None:
    served, url = hub
    served.publish("org/bert", files)
    served.publish("org/gated", files)
    served.gated.add("org/gated")
    client = Client(url, tmp_path)
    for (name, message), found in zip(
        NOT_HAD.items(), client.resolve_each(*((name, True) for name in NOT_HAD)), strict=True
    ):
        assert isinstance(found, str) and message in found, name
    assert "config.json" in client.resolve("hf:org/gated", HF_TOKEN="granted")[1]


def test_without_the_hub_what_is_missing_is_an_error(hub: tuple[Hub, str], files: Files, tmp_path: Path) -> None:
    served, url = hub
    served.publish("org/bert", files)
    found = Client(url, tmp_path).resolve("hf:org/bert", HF_HUB_OFFLINE="1")
    assert "the Hub does not answer, and the cache lacks files" in found
    served.error = 503
    assert Client(url, tmp_path).resolve("hf:org/bert").startswith("hf:org/bert: the ")


def test_the_command_line_takes_names_of_the_hub(hub: tuple[Hub, str], files: Files, tmp_path: Path) -> None:
    served, url = hub
    served.publish("org/bert", files)
    client = Client(url, tmp_path)
    assert "bert" in client.run("-m", "triptych.service.cli.main", "inspect", "hf:org/bert", "--json")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return converted("llama", tmp_path_factory.mktemp("gguf")).read_bytes()


def test_a_gguf_file_is_downloaded_alone_by_its_format_or_path(
    hub: tuple[Hub, str], gguf: bytes, tmp_path: Path
) -> None:
    served, url = hub
    files = {"README.md": b"#", "x-Q4_K_M.gguf": gguf, "x-Q8_0.gguf": gguf + bytes(8), "mmproj-x.gguf": b"GGUF"}
    commit = served.publish("org/x", files)
    one = served.publish("org/one", {"config.json": b"{}", "one.gguf": gguf})
    client = Client(url, tmp_path)
    asked = ("hf:org/x:q8_0", "https://huggingface.co/org/x/blob/main/x-Q8_0.gguf", "hf:org/x", "hf:org/one")
    found = client.resolve_each(*((name, False) for name in asked))
    assert [name for name, _ in found] == [
        f"hf:org/x:q8_0@{commit}",
        f"hf:org/x:x-Q8_0.gguf@{commit}",
        f"hf:org/x@{commit}",
        f"hf:org/one@{one}",
    ]
    expected = {"README.md", "config.json", "one.gguf", "x-Q4_K_M.gguf", "x-Q8_0.gguf"}
    assert {name.split()[1] for name in served.requests} == expected
    served.error = 503  # what is in the cache needs no Hub
    assert client.resolve_each(*((name, False) for name, _ in found)) == found
    assert "no GGUF model Q5_0" in client.resolve("hf:org/x:Q5_0")


def test_a_gguf_model_of_the_hub_generates_by_any_name(hub: tuple[Hub, str], gguf: bytes, tmp_path: Path) -> None:
    served, url = hub
    served.publish("org/x", {"x-Q4_K_M.gguf": gguf})
    client = Client(url, tmp_path)
    command = ("-m", "triptych.service.cli.main", "inspect", "--json")
    reports = [json.loads(client.run(*command, name)) for name in ("org/x", "hf.co/org/x:Q4_K_M", f"m={url}/org/x")]
    assert [report["name"] for report in reports] == ["x", "x", "m"]
    code = "from triptych.model.llm import LLM; print(LLM('org/x').info.name)"
    assert client.run("-c", code, HF_HUB_OFFLINE="1") == "x\n"


def test_a_download_writes_lines_with_rate_and_remaining_time_where_there_is_no_terminal(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    """On a terminal it draws one bar."""
    served, url = hub
    served.publish("org/large", {"config.json": b"{}", "model.safetensors": os.urandom(30 << 20)})
    client = Client(url, tmp_path)
    code = (
        "import sys, logging; from triptych.model.checkpoint import hub, progress\n"
        "logging.basicConfig(format='%(message)s', level=logging.INFO, stream=sys.stdout)\n"
        "progress.LINE_SECONDS = progress._BAR_SECONDS = 0; sys.stderr = sys.stdout; hub.local_folder('hf:org/large')"
    )
    lines = [line for line in client.run("-c", code).splitlines() if "MB downloaded" in line]
    assert len({line.split()[1] for line in lines}) >= 2, lines
    assert re.fullmatch(r"hf:org/large: \d+ of 31 MB downloaded, \d+\.\d MB/s, 0:\d\d left", lines[-1]), lines
    read, write = pty.openpty()
    with os.fdopen(read, "rb") as terminal:
        environment = client.environment | {"HF_HOME": str(tmp_path / "other")}
        command = [sys.executable, "-m", "triptych.service.cli.main", "download", "org/large"]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=write, timeout=60)
        os.close(write)
        shown = b""
        with suppress(OSError):
            while piece := os.read(terminal.fileno(), 1 << 16):
                shown += piece
    assert done.returncode == 0 and b"hf:org/large [" in shown and b" MB/s, 0:" in shown, shown
    assert shown.count(b"\n") == 1, shown


def contents(folder: Path) -> dict[str, int]:
    return {str(file): file.lstat().st_mtime_ns for file in [folder, *folder.rglob("*")]}


def test_a_cache_that_was_filled_before_serves_without_network_and_is_not_written(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    """As in the manifests: one downloads, the others have the volume to read and no network."""
    served, url = hub
    commit = served.publish("org/bert", files)
    client = Client(url, tmp_path)
    assert client.run("-m", "triptych.service.cli.main", "download", "hf:org/bert") == f"hf:org/bert@{commit}\n"
    before, asked = contents(tmp_path), served.requests.copy()
    offline = {"HF_HUB_OFFLINE": "1"}
    assert (
        client.run("-m", "triptych.service.cli.main", "download", "hf:org/bert", **offline) == f"hf:org/bert@{commit}\n"
    )
    line = client.run("-m", "triptych.service.cli.main", "encode", "--model", "hf:org/bert", "import os", **offline)
    assert len(json.loads(line)["embedding"]) == 32
    assert contents(tmp_path) == before and served.requests == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bert",), "bert: expected ORGANISATION/NAME"),
        (("hf:org/bert",), "the Hub does not answer, and the cache lacks files"),
    ],
)
def test_what_cannot_be_downloaded_ends_with_a_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "triptych.service.cli.main", "download", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


DOWNLOAD = """
import asyncio, os, sys
from pathlib import Path
from triptych.model.errors import ConfigError
from triptych.service.runtimes.hub_download import download

def children():
    return Path("/proc/self/task", str(os.getpid()), "children").read_text().split()

async def main():
    most, seconds = int(sys.argv[1]), float(sys.argv[2])
    for path in sys.argv[3:]:
        try:
            async with asyncio.timeout(seconds):
                print(await download(path, pickle=True, max_bytes=most, log_format="plain"))
        except (ConfigError, TimeoutError) as error:
            print(type(error).__name__, error)
    print("left:", len(children()))

asyncio.run(main())
"""


def test_a_download_while_the_service_runs_is_bounded_and_can_be_given_up(
    hub: tuple[Hub, str], files: Files, tmp_path: Path
) -> None:
    served, url = hub
    commit = served.publish("org/bert", files)
    client = Client(url, tmp_path)
    refused = client.run("-c", DOWNLOAD, "1000", "60", "hf:org/bert", "hf:org/none")
    assert "no such repository" in refused
    assert "MB would be downloaded, more than the 0.001 MB that max_download allows" in refused
    assert not [name for name in served.requests if name == "GET model.safetensors"]
    served.held = threading.Event()
    given_up = client.run("-c", DOWNLOAD, "1000000", "3", "hf:org/bert")
    served.held.set()
    assert given_up == "TimeoutError \nleft: 0\n"
    done = client.run("-c", DOWNLOAD, "1000000", "60", "hf:org/bert")
    assert done == f"{tmp_path}/hub/models--org--bert/snapshots/{commit}\nleft: 0\n"
    served.error = 503  # what is in the cache needs no Hub
    assert client.run("-c", DOWNLOAD, "1000000", "60", "hf:org/bert") == done


ADAPTED = """
import sys
from pathlib import Path
from triptych.service.runtimes.assembly import pin_models, read_models, with_folders
from triptych.service.settings.resolve import resolve_config
config = pin_models(resolve_config({"base": {"path": sys.argv[1]}}, {"lora": ("fr=hf:org/fr", "sql=org/fr@v1")}))
print(*(one.path for one in config.models[1:]))
for one in read_models(with_folders(config))[1:]:
    print(one.name, one.adapter_of, *sorted(file.name for file in Path(one.adapter_path).iterdir()), sep=":")
"""


def test_adapters_of_the_hub_are_read_from_the_cache_without_network(hub: tuple[Hub, str], tmp_path: Path) -> None:
    served, url = hub
    folder = folders()["fr"]
    found = {file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": b"#", "optimizer.pt": bytes(9)}
    commit = served.publish("org/fr", found)
    tagged = served.publish("org/fr", found | {"extra.json": b"{}"}, "v1")
    client = Client(url, tmp_path)
    read = "README.md:adapter_config.json:adapter_model.safetensors"
    for offline in ("0", "1"):
        told = client.run("-c", ADAPTED, str(folders()["base"]), HF_HUB_OFFLINE=offline).split()
        assert told == [f"hf:org/fr@{commit}", f"hf:org/fr@{tagged}", f"fr:base:{read}", f"sql:base:{read}:extra.json"]
