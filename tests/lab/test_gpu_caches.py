"""The GPU bench's archives of compiler caches."""

from __future__ import annotations

import json
import random
from pathlib import Path

from lab.bench.gpu import caches


def test_caches_travel_in_parts_that_fit(tmp_path: Path) -> None:
    made, parts = tmp_path / "made", tmp_path / "parts"
    (made / "triton" / "key").mkdir(parents=True)
    parts.mkdir()
    rng = random.Random(0)
    contents = {f"triton/key/{at}.cubin": rng.randbytes(200_000) for at in range(9)}
    for name, content in contents.items():
        (made / name).write_bytes(content)
    told = list(caches.pack(made, parts, part_bytes=1_000_000, most_parts=2))
    written = sorted(parts.iterdir())
    assert len(written) == 2 and all(part.stat().st_size <= 1_000_000 for part in written)
    assert "of 9 cached files are left out" in told[-1]
    list(caches.pack(made, parts, part_bytes=1_000_000))
    assert caches.unpack(parts, tmp_path / "again") == 9
    assert {name: (tmp_path / "again" / name).read_bytes() for name in contents} == contents
    written = sorted(parts.iterdir())
    for part in written[1:]:
        part.unlink()
    assert 0 < caches.unpack(parts, tmp_path / "some") < 9  # each can be read alone


def test_kernels_are_found_in_another_folder(tmp_path: Path) -> None:
    key = tmp_path / "made" / "triton" / "key"
    key.mkdir(parents=True)
    (key / "attend.cubin").write_bytes(b"code")
    (key / "__grp__attend.json").write_text(json.dumps({"child_paths": {"attend.cubin": str(key / "attend.cubin")}}))
    list(caches.pack(tmp_path / "made", tmp_path))
    caches.unpack(tmp_path, tmp_path / "again")
    moved = tmp_path / "again" / "triton" / "key"
    assert json.loads((moved / "__grp__attend.json").read_text())["child_paths"] == {
        "attend.cubin": str(moved / "attend.cubin")
    }


def test_a_file_larger_than_a_part_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a").write_bytes(random.Random(0).randbytes(100_000))
    (tmp_path / "made" / "b").write_bytes(b"small")
    list(caches.pack(tmp_path / "made", tmp_path, part_bytes=50_000))
    assert caches.unpack(tmp_path, tmp_path / "again") == 1
    assert (tmp_path / "again" / "b").read_bytes() == b"small"
