"""The files of the weights cache: changes that need another file, damage, folders without room, and permissions."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import copied, saved
from tests.model.test_weights_cache import KIND, MIB, assert_loads, files, library, needs_native, packed, started
from triptych.model.checkpoint import content, packed_file, weights_cache
from triptych.model.checkpoint.content import signs_of
from triptych.model.checkpoint.folder import errors_about, read_checkpoint
from triptych.model.checkpoint.packed_file import ArraySpec, PackedFileError, PackedFileWriter, Table, read_table
from triptych.model.checkpoint.weights_cache import WeightsCache
from triptych.model.errors import ConfigError
from triptych.model.linear.factory import LinearFactory
from triptych.model.network import packed_weights
from triptych.model.network.native_stack import native_linears
from triptych.model.network.transformer import Transformer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class TestWhatChanges:
    """A change of anything that packed bytes depend on leads to another file."""

    def test_a_file_that_was_written_in_place(self, folder: Path, tmp_path: Path) -> None:
        """The size is equal and the modification time set back: the inode's change time differs."""
        checkpoint = copied(KIND, tmp_path)
        assert [started(folder, checkpoint) for _ in range(2)] == ["written", "mapped"]
        weights = next(checkpoint.glob("*.safetensors"))
        before = weights.stat()
        with weights.open("r+b") as file:
            file.seek(-40, os.SEEK_END)
            file.write(bytes(4))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        changed = packed(folder, checkpoint)
        assert_loads(changed, checkpoint)
        assert changed.outcome == "written"

    def test_pages_of_files_whose_times_say_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Container images may give every version of a file the same times and inode."""
        file = tmp_path / "file"
        file.write_bytes(bytes(MIB))
        before, state = signs_of([file]), os.stat(file)
        monkeypatch.setattr(os, "fstat", lambda _: state)
        assert signs_of([file]) == before
        file.write_bytes(b"1" * MIB)
        assert signs_of([file]) != before

    def test_a_copy_elsewhere_is_known_by_its_bytes(self, folder: Path, tmp_path: Path) -> None:
        assert started(folder, saved(KIND).path) == "written"
        assert started(folder, copied(KIND, tmp_path)) == "mapped"
        assert len(files(folder)) == 1

    def test_what_was_just_written_is_read_again(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another write within the clock's resolution might go unnoticed."""
        monkeypatch.setattr(content, "_SETTLED_SECONDS", 60.0)
        checkpoint = copied(KIND, tmp_path)
        next(checkpoint.glob("*.safetensors")).touch()
        assert [started(folder, checkpoint) for _ in range(2)] == ["written", "mapped"]
        assert not list(folder.glob("*.content"))

    def test_a_checkpoint_that_changes_while_it_is_packed(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = copied(KIND, tmp_path)
        fill = packed_weights.fill_weights

        def changing(*given: Any) -> Transformer:
            next(checkpoint.glob("*.safetensors")).touch()
            return fill(*given)

        monkeypatch.setattr(packed_weights, "fill_weights", changing)
        assert started(folder, checkpoint) == "not kept: the checkpoint changed while it was read"
        assert not files(folder)

    @needs_native
    def test_another_cpu_dtype_or_number_format(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = saved(KIND).path
        config = read_checkpoint(checkpoint).config
        ways = [LinearFactory(), LinearFactory(torch.bfloat16)]
        ways += [native_linears(config, dtype, library()) for dtype in (torch.float32, torch.bfloat16)]
        ways += [
            native_linears(config, dtype, library(), quantization=quantization)
            for dtype in (torch.float32, torch.bfloat16)
            for quantization in ("int8", "int4", "int8-g128")
        ]
        assert [started(folder, checkpoint, way) for way in ways] == ["written"] * len(ways)
        assert [started(folder, checkpoint, way) for way in ways] == ["mapped"] * len(ways)
        with monkeypatch.context() as patch:
            patch.setattr(library(), "_file", "native-of-another-cpu.so")
            assert started(folder, checkpoint, ways[-1]) == "written"
        with monkeypatch.context() as patch:
            patch.setattr(library(), "tiles", not library().tiles)
            assert started(folder, checkpoint, ways[-1]) == "written"
        monkeypatch.setattr(packed_weights, "_code", lambda: "another version")
        assert started(folder, checkpoint) == "written"
        assert len(files(folder)) == len(ways) + 3


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - packed_file.ALIGNMENT)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def damaged(offset: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            opened.write(b"damaged")

    return damage


def opened_to_others(file: Path) -> None:
    file.chmod(0o666)


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        [cut, emptied, opened_to_others, damaged(0), damaged(30), damaged(64), damaged(120), damaged(-5000)],
        ids=lambda damage: damage.__name__,
    )
    def test_a_damaged_file_is_replaced(
        self, damage: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoint = saved(KIND).path
        started(folder, checkpoint)
        damage(files(folder)[0])
        weights = packed(folder, checkpoint)
        assert not weights.is_found
        assert_loads(weights, checkpoint)
        assert weights.outcome == "written"
        assert "packed weights are removed" in caplog.text
        assert started(folder, checkpoint) == "mapped"

    @pytest.mark.parametrize("kind", ["weights", "content"])
    def test_a_named_pipe_is_not_waited_for(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(content, "_SETTLED_SECONDS", 0.0)  # the checkpoint may have been made just now
        started(folder, saved(KIND).path)
        (place,) = folder.glob(f"*.{kind}")
        place.unlink()
        os.mkfifo(place, 0o600)
        assert started(folder, saved(KIND).path) == ("written" if kind == "weights" else "mapped")
        assert started(folder, saved(KIND).path) == "mapped"

    def test_a_file_under_another_name_is_not_taken(self, folder: Path, tmp_path: Path) -> None:
        started(folder, saved(KIND).path)
        started(folder, saved(KIND).path, LinearFactory(torch.bfloat16))
        one, other = files(folder)
        os.replace(one, other)
        assert started(folder, saved(KIND).path) == "written"
        assert started(folder, saved(KIND).path, LinearFactory(torch.bfloat16)) == "written"

    def test_what_a_crash_leaves_is_not_read_and_is_removed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crash(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PackedFileWriter, "_finish", crash)
            patch.setattr(Path, "unlink", crash)
            with pytest.raises(KeyboardInterrupt):
                started(folder, saved(KIND).path)
        (left,) = folder.glob("*.new")
        with left.open("rb") as file, pytest.raises(PackedFileError):
            read_table(file.fileno())
        assert started(folder, saved(KIND).path) == "written"
        assert not list(folder.glob("*.new"))


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestWhereNothingCanBeKept:
    """The model starts from its checkpoint where the cache cannot be used."""

    def test_no_room(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        weights = packed(folder, saved(KIND).path)
        with file_limit(packed_file.ALIGNMENT):
            assert_loads(weights, saved(KIND).path)
        assert weights.outcome.startswith("not kept: ")
        assert "not kept" in caplog.text
        assert not files(folder) and not list(folder.glob("*.new"))

    def test_no_room_any_more(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts written before are used from the file, the rest from memory."""
        weights = packed(folder, saved(KIND).path)
        write, taken = packed_file._write_all, []

        def full(file: int, data: memoryview, offset: int) -> None:
            taken.append(offset)
            if len(taken) > 3:
                raise OSError(28, "No space left on device")
            write(file, data, offset)

        monkeypatch.setattr(packed_file, "_PIECE", packed_file.ALIGNMENT)
        monkeypatch.setattr(packed_file, "_write_all", full)
        assert_loads(weights, saved(KIND).path)
        assert "No space left" in weights.outcome
        assert not files(folder) and not list(folder.glob("*.new"))

    def test_a_folder_to_read_only(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started(folder, saved(KIND).path)
        (folder / "lock").unlink()
        (folder / "lock").mkdir()  # a superuser, who runs tests in containers, may write anywhere
        assert started(folder, saved(KIND).path) == "mapped"
        assert started(folder, saved(KIND).path, LinearFactory(torch.bfloat16)) == "not kept: it cannot be written"

    def test_another_process_that_hangs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights_cache, "_LOCK_SECONDS", 0.2)
        with WeightsCache(folder).locked() as locked:
            assert locked
            assert started(folder, saved(KIND).path) == "not kept: it cannot be written"

    def test_it_is_larger_than_the_cache_may_be(self, folder: Path) -> None:
        assert "more than weights_cache_size" in started(folder, saved(KIND).path, size=1000)


class TestWhoMayWrite:
    def test_a_folder_is_made_for_its_owner_alone(self, folder: Path) -> None:
        WeightsCache(folder / "deeper")
        assert stat.S_IMODE((folder / "deeper").stat().st_mode) == 0o700

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
    def test_others_must_not(self, mode: int, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=r"weights_cache .* may be written by others"):
            WeightsCache(folder)

    def test_it_must_be_ours(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 7)
        if folder.stat().st_uid:
            with pytest.raises(ConfigError, match="belongs to user"):
                WeightsCache(folder)
        else:
            WeightsCache(folder)  # as a superuser, who may do anything

    def test_it_must_be_a_folder(self, folder: Path) -> None:
        folder.touch()
        with pytest.raises(ConfigError, match="weights_cache"):
            WeightsCache(folder)


def test_a_file_in_memory_has_room() -> None:
    """The kernel reports no blocks of it, as of a tmpfs without a bound: that is not a full disk."""
    table = Table.of({}, {"a": ArraySpec("float32", (4,), 16)})
    with os.fdopen(os.memfd_create("weights"), "r+b", buffering=0) as file:
        PackedFileWriter(file.fileno(), table, lasting=False).write(
            [("a", memoryview(bytes(range(16))))], lambda _: None
        )
        assert os.pread(file.fileno(), 16, table.places["a"].offset) == bytes(range(16))


def test_no_room_is_said_as_that() -> None:
    with pytest.raises(ConfigError, match=r"^no room for 1 GB of packed weights$"), errors_about(""):
        raise OSError(errno.ENOSPC, "no room for 1 GB of packed weights")
