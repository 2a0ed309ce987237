"""The limits that Linux's control groups (containers, systemd's units) set to this process. Stdlib only.

A limit of a group holds for the groups in it, so the whole way from this process's group to the root is looked at. In a
container the root of the files is often the container's own group, and the process's path does not exist there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNTS = {  # where the groups of a controller are, for versions 2 (empty: all controllers) and 1
    "": ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    "memory": ("sys/fs/cgroup/memory",),
    "cpu": ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"),
}


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's group and of those around it, of both versions."""
    own = _own_groups(root)
    for kind in ("", controller):
        path = PurePosixPath(own.get(kind, "/"))
        for mount in _MOUNTS[kind]:
            for group in (path, *path.parents):
                yield root / mount / str(group).lstrip("/")


def _own_groups(root: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; that of version 2 has no name."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    parts = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, names, path in parts for name in names.split(",")}
