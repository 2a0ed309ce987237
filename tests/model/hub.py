"""A hub on 127.0.0.1 with the part of the Hugging Face Hub's protocol that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Hub:
    """Repositories of files by revision; counts requests, and can refuse, redirect and truncate them."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}  # by repository, then commit
        self.branches: dict[tuple[str, str], str] = {}
        self.requests: Counter[str] = Counter()  # by method and file
        self.ranges: list[str] = []  # the requested ranges
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}  # files whose next answer ends after this number of bytes
        self.error: int = 0  # status of every answer; 0: no error
        self.held: threading.Event | None = None  # every large file waits for this event

    def publish(self, repository: str, files: Files, branch: str = "main") -> str:
        """Publish a commit and point the branch at it."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repository, {})[digest] = files
        self.branches[repository, branch] = digest
        return digest

    def resolve(self, repository: str, revision: str) -> str | None:
        found = self.branches.get((repository, revision), revision)
        return found if found in self.commits.get(repository, {}) else None


@contextmanager
def running() -> Iterator[tuple[Hub, str]]:
    """Run the hub; yield it and its address."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if self.hub.error:
            self._send(self.hub.error, b"", {})
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "stored":  # a large file's address after a redirect
            self._file("/".join(parts[1:3]), parts[3], "/".join(parts[4:]), body=body)
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body=body)
        else:
            self.hub.requests[f"{self.command} {self.path}"] += 1
            self._send(404, b"", {})

    def _api(self, repository: str, rest: list[str]) -> None:
        commit = self.hub.resolve(repository, rest[1] if len(rest) > 1 else "main")
        if self._refused(repository, commit):
            return
        files = self.hub.commits[repository][commit or ""]
        if rest[:1] == ["tree"]:
            sizes = {name: len(data) for name, data in files.items()}
            tree = [{"type": "file", "path": n, "size": size, "oid": _digest(files[n])} for n, size in sizes.items()]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            return
        info = {"id": repository, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0}
        info["siblings"] = [{"rfilename": name} for name in files]  # type: ignore[assignment]
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repository: str, revision: str, name: str, *, body: bool) -> None:
        commit = self.hub.resolve(repository, revision)
        if self._refused(repository, commit):
            return
        data = self.hub.commits[repository][commit or ""].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        self.hub.requests[f"{self.command} {name}"] += 1
        headers = {"X-Repo-Commit": commit or "", "ETag": f'"{_digest(data)}"'}
        if len(data) > 10_000:
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{_digest(data)}"'}
            self._send(302, b"", {**headers, **linked, "Location": f"{self._store}/{repository}/{commit}/{name}"})
            return
        self._send(200, data, headers, body=body)

    @property
    def _store(self) -> str:
        """Return the address of the second host, which serves large files."""
        return f"http://localhost:{self.server.server_address[1]}/stored"

    def _file(self, repository: str, commit: str, name: str, *, body: bool) -> None:
        data = self.hub.commits[repository][commit][name]
        if self.hub.held is not None:
            self.hub.held.wait(60)
        begin, status, headers = 0, 200, {"ETag": f'"{_digest(data)}"', "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked:
            self.hub.ranges.append(asked)
            begin, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(status, data[begin:], headers, body=body, cut=self.hub.cut.pop(name, None) if body else None)

    def _refused(self, repository: str, commit: str | None) -> bool:
        if repository not in self.hub.commits:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository in self.hub.gated and self.headers.get("Authorization") != "Bearer granted":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
