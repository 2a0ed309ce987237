"""Confines a process: no files, no sockets, no programs, no other processes, limited memory. The kernel enforces it.

Resource limits work on every kernel: with `RLIMIT_NOFILE` 0 nothing can be opened. If the kernel has them, Landlock
denies files, TCP ports and signals, and a seccomp filter allows only the system calls that computing and answering
need. `support` returns what this kernel has; `confine` raises if one of its means fails.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from dataclasses import dataclass

_DUMPABLE, _PARENT_DEATH_SIGNAL, _SECCOMP, _NO_NEW_PRIVILEGES = 4, 1, 22, 38  # options of prctl
_FILTER = 2  # the mode of `_SECCOMP`
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # Landlock's system calls, the same on every machine
_ASK_VERSION = 1

# By architecture: its id in seccomp, and the numbers of the allowed system calls: read write close fstat lseek mmap
# mprotect munmap mremap madvise brk, sendto recvfrom, exit exit_group, rt_sigaction rt_sigprocmask rt_sigreturn
# sigaltstack setitimer, futex sched_yield sched_getaffinity getcpu membarrier rseq set_robust_list restart_syscall,
# clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday times getrusage, getpid gettid getrandom sysinfo;
# x86-64 has `time` as well.
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOWED = {
    "x86_64": """0 1 3 5 8 9 10 11 25 28 12  44 45  60 231  13 14 15 131 38  202 24 204 309 324 334
        273 219  228 229 230 35 96 100 98  39 186 318 99  201""",
    "aarch64": """63 64 57 80 62 222 226 215 216 233 214  206 207  93 94  134 135 139 132 103  98 124 123 168 283 293
        99 128  113 114 115 101 169 153 165  172 178 278 179""",
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF instructions: load a word, jump if equal, return
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # results of a filter; a refused call fails with EPERM
_CALL, _MACHINE = 0, 4  # offsets in the filter's input: number of the call, architecture

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Support:
    """The means of confinement that this kernel has."""

    landlock: int  # its version; 0: none
    seccomp: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the means that this kernel, or the container, lacks."""
        return (*(() if self.landlock else ("Landlock",)), *(() if self.seccomp else ("seccomp",)))


def support() -> Support:
    """Return the kernel's means of confinement; changes nothing."""
    landlock = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    _libc.prctl(_SECCOMP, _FILTER, None)  # a kernel with seccomp filters fails to read a filter at address 0
    has_filters = ctypes.get_errno() == 14  # EFAULT
    return Support(max(int(landlock), 0), has_filters and platform.machine() in _ALLOWED)


def hide_process() -> None:
    """Hide memory and environment of this process from other processes of the user; also disables core dumps."""
    _prctl(_DUMPABLE, 0)


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent`, which has forked it, ends."""
    _prctl(_PARENT_DEATH_SIGNAL, 9)
    if os.getppid() != parent:
        os._exit(1)


def confine(memory: int) -> None:
    """Confine this process irreversibly, with `memory` bytes of address space; raises `OSError`.

    Open descriptors stay usable. The process must have one thread.
    """
    hide_process()
    _prctl(_NO_NEW_PRIVILEGES, 1)
    found = support()
    if found.landlock:
        _close_files(found.landlock)
    for kind, bound in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(kind, (bound, bound))
    if found.seccomp:
        _filter_calls()


def _close_files(version: int) -> None:
    """Deny every right that this version of Landlock handles."""
    files = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    ports, outside = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # TCP; signals and abstract sockets
    size = 8 * (1 + (version >= 4) + (version >= 6))
    rights = struct.pack("=QQQ", files, ports, outside)[:size]
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _filter_calls() -> None:
    program = filter_program(platform.machine())
    code = ctypes.create_string_buffer(program)
    pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _checked(_libc.prctl(_SECCOMP, _FILTER, pointer), "prctl(PR_SET_SECCOMP)")


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter: calls of another architecture kill the process, calls that are not listed fail."""
    name, calls = _MACHINES[machine], [int(number) for number in _ALLOWED[machine].split()]
    steps = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, name), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _CALL)]
    steps += [(_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _prctl(option: int, value: int) -> None:
    arguments = (ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _checked(_libc.prctl(option, *arguments), f"prctl({option})")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
