"""The command `triptych doctor`: looks at the machine and the settings, and says what would hinder or slow a service.

A check is ok, a warning (the service runs, but slower or less safely than it could) or a failure (it would not start).
Nothing is compiled, downloaded or changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from triptych.model.errors import ConfigError, EngineError
from triptych.model.native import build
from triptych.model.system.cache_folders import untrusted, user_cache
from triptych.model.system.cpu_threads import cpu_quota, threads_of, usable_cpus
from triptych.model.system.host_memory import available_memory
from triptych.service.cli.service_client import ServiceClient
from triptych.service.settings import sources
from triptych.service.settings.option_table import BY_NAME
from triptych.service.settings.service_settings import is_loopback

OPTIONS = tuple(BY_NAME[name] for name in ("host", "port", "threads"))
_GB = 1e9
_FEW_BYTES = 5 * 1024**3  # free space in a cache below which there is a warning
_FOR_WEIGHTS = 0.8  # share of the memory; the rest is for the KV cache and the processes
_FORMATS = {"bfloat16": 2.0, "int8": 1.05, "int4": 0.6}  # bytes of a parameter
_MARKS = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL"}


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about one subject, and what to do if it is not ok."""

    name: str
    status: Literal["ok", "warning", "failure"]
    found: str
    advice: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print all checks, and return 1 if one failed, else 0."""
    try:
        settings: Mapping[str, Any] = sources.from_environment(os.environ)
        bad = None
    except ConfigError as error:
        settings, bad = {}, Check("settings", "failure", str(error), "correct or unset the variable")
    settings = {**settings, **sources.from_arguments(arguments, OPTIONS)}
    looks = [look for look in _LOOKS if look not in _WITH_TORCH or find_spec("torch") is not None]
    found = [*([bad] if bad else []), *(check for look in looks for check in look(settings))]
    failed = any(check.status == "failure" for check in found)
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}))
    else:
        for check in found:
            print(f"{_MARKS[check.status]}  {check.name:<13}  {check.found}")
            if check.advice:
                print(f"{'':<21}{check.advice}")
    return int(failed)


def _versions(_: Mapping[str, Any]) -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check("versions", "ok", f"triptych {_version('triptych')}, Python {platform.python_version()}, {system}")
    torch = _version("torch")
    if torch is None:
        yield Check("torch", "failure", "not installed", "install triptych with its dependencies")
    else:
        yield Check("torch", "ok", torch)


def _kernels(_: Mapping[str, Any]) -> Iterator[Check]:
    levels = build.cpu_levels()
    level = levels[0].name if levels else "none that is known"
    yield Check("cpu", "ok" if levels else "warning", f"best instruction level: {level}")
    compiler, why = "", ""
    try:
        compiler = build.compiler_version()
        library = build.prebuilt() or build.compiled_earlier()
    except build.BuildError as error:
        library, why = build.prebuilt(), str(error)
    if library is not None:
        yield from _loaded(library)
    elif not why:
        yield Check("kernels", "ok", "none yet: the first start compiles them, in about a minute")
    else:
        advice = "see the line of the kernels cache" if compiler else "install GCC, or a wheel with compiled kernels"
        yield Check("kernels", "warning", f"none: torch computes, several times slower ({why})", advice)
    yield Check("compiler", "ok", compiler or f"{why}; it is not needed" if compiler or library else why)


def _loaded(library: build.Built) -> Iterator[Check]:
    from triptych.model.native.library import Library

    try:
        yield Check("kernels", "ok", Library(library).description)
    except OSError as error:
        yield Check("kernels", "failure", f"{library.path} does not load: {error}", "remove the file")


def _threads(settings: Mapping[str, Any]) -> Iterator[Check]:
    threads, allowed = settings.get("threads") or threads_of(os.environ), len(os.sched_getaffinity(0))
    quota = cpu_quota()
    limit = f", of a quota of {quota:g} CPUs" if quota is not None else ""
    found = f"{threads} threads on {allowed} CPUs{limit}"
    if threads > usable_cpus():
        yield Check("threads", "warning", found, f"threads wait for each other: use --threads {usable_cpus()}")
    else:
        yield Check("threads", "ok", found)


def _memory(_: Mapping[str, Any]) -> Iterator[Check]:
    free = available_memory()
    fits = ", ".join(f"{free * _FOR_WEIGHTS / size / 1e9:.1f} B in {name}" for name, size in _FORMATS.items())
    status: Literal["ok", "warning"] = "ok" if free > _GB else "warning"
    advice = "" if free > _GB else "free memory, or serve a smaller model"
    yield Check("memory", status, f"{free / _GB:.1f} GB available: fits models of about {fits} parameters", advice)


def _caches(settings: Mapping[str, Any]) -> Iterator[Check]:
    try:
        own = user_cache()
    except RuntimeError as error:
        yield Check("cache", "warning", str(error), "set XDG_CACHE_HOME to a folder")
        return
    hub = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    weights = settings.get("weights_cache", "auto")
    kernels = os.environ.get("TRIPTYCH_KERNEL_CACHE", "")
    folders = {
        "weights": own / "weights" if weights == "auto" else None if weights is None else Path(weights),
        "kernels": Path(kernels) if kernels else own,
        "hub": Path(os.environ.get("HF_HUB_CACHE") or hub / "hub").expanduser(),
    }
    for name, folder in folders.items():
        if folder is not None:
            yield _cache(f"{name} cache", folder)


_MOVED_BY = {
    "weights cache": "TRIPTYCH_WEIGHTS_CACHE or XDG_CACHE_HOME",
    "kernels cache": "XDG_CACHE_HOME",
    "hub cache": "HF_HOME",
}


def _cache(name: str, folder: Path) -> Check:
    there = next((one for one in (folder, *folder.parents) if os.path.exists(one)), Path("/"))
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "warning", f"{folder} cannot be written", f"set {_MOVED_BY[name]} to a folder of your own")
    if there == folder and name != "hub cache" and (reason := untrusted(folder.stat())):
        return Check(name, "warning", f"{folder} {reason}", "it is not used: make it writable for yourself alone")
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / _GB:.1f} GB free"
    return Check(name, "warning", found, "free some space") if free < _FEW_BYTES else Check(name, "ok", found)


def _port(settings: Mapping[str, Any]) -> Iterator[Check]:
    host, port = (settings.get(name, BY_NAME[name].default) for name in ("host", "port"))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except (OSError, OverflowError) as error:
        owner = " by a triptych service" if _is_ours(host, port) else ""
        reason = f"in use{owner}" if getattr(error, "errno", None) == 98 else str(error)
        yield Check("port", "failure", f"{host}:{port} is not free: {reason}", "choose another with --port")
    else:
        yield Check("port", "ok", f"{host}:{port} is free")


def _is_ours(host: str, port: int) -> bool:
    """Return whether a service of triptych answers there."""
    at = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    try:
        ServiceClient(f"http://{f'[{at}]' if ':' in at else at}:{port}").info(1.0)
    except EngineError:
        return False
    return True


def _ray(settings: Mapping[str, Any]) -> Iterator[Check]:
    if find_spec("ray") is not None:
        yield Check("ray", "ok", f"Ray {_version('ray')}")
    elif settings.get("runtime") == "ray":
        yield Check("ray", "failure", "not installed, but TRIPTYCH_RUNTIME asks for it", "install triptych[ray]")
    else:
        yield Check("ray", "ok", "not installed: one process serves, on this machine (--runtime local)")


def _gpu(_: Mapping[str, Any]) -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = (
                torch.cuda.get_device_name(index),
                ".".join(map(str, torch.cuda.get_device_capability(index))),
            )
            found = f"{index}: {name}, capability {capability}, {free / _GB:.1f} of {total / _GB:.1f} GB free"
            yield Check("gpu", "ok", found)
        if find_spec("triton") is None:
            yield Check("triton", "warning", "not installed: torch computes on the GPU, slower", "install triton")
    elif Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        found = f"there is a driver, but torch {torch.__version__} sees no GPU"
        advice = "install PyTorch's CUDA build, and check CUDA_VISIBLE_DEVICES and the driver (nvidia-smi)"
        yield Check("gpu", "warning", found, advice)
    else:
        yield Check("gpu", "ok", "none: models run on the CPU")


def _keys(settings: Mapping[str, Any]) -> Iterator[Check]:
    host = settings.get("host", BY_NAME["host"].default)
    local = is_loopback(host)
    keys, file = settings.get("api_keys", ()), str(settings.get("api_key_file", ""))
    for name in ("api_key_file", "admin_key_file"):
        path = Path(str(settings.get(name, "")) or "/nonexistent")
        if settings.get(name) and not os.access(path, os.R_OK):
            yield Check(
                "keys", "failure", f"{name} {path} cannot be read", "give the path of a file with one key a line"
            )
        elif settings.get(name) and path.stat().st_mode & 0o004:
            yield Check("keys", "warning", f"{name} {path} can be read by everybody here", f"chmod o-r {path}")
    if keys or file:
        yield Check("keys", "ok", "clients must send a key")
    elif local:
        yield Check("keys", "ok", f"none: open to this machine alone ({host})")
    else:
        yield Check("keys", "warning", f"none, and {host} is open to other machines", "set TRIPTYCH_API_KEYS")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_LOOKS: tuple[Callable[[Mapping[str, Any]], Iterator[Check]], ...] = (
    _versions,
    _kernels,
    _threads,
    _memory,
    _gpu,
    _caches,
    _ray,
    _port,
    _keys,
)
_WITH_TORCH = (_kernels, _gpu)
