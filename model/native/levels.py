"""Levels of instructions for which libraries are compiled ahead of time, and which of them a CPU can run.

The x86-64 levels are those of the psABI (https://gitlab.com/x86-psABIs/x86-64-ABI). CPU flags are spelt as Linux spells
them in /proc/cpuinfo.
"""

from __future__ import annotations

from dataclasses import dataclass

_V3 = (
    *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
    *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
)
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ARM_DOT = ("fp", "asimd", "crc32", "atomics", "asimdrdm", "asimddp")  # Armv8.2 as GCC writes it, with dot products


@dataclass(frozen=True, slots=True)
class Level:
    """A level: `flags` are GCC's, `needs` are the CPU's flags without which its code does not run."""

    name: str
    machine: str  # as `platform.machine()` says
    flags: tuple[str, ...]
    needs: frozenset[str]


_BF16_VNNI = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
LEVELS = (  # best first
    Level(
        "x86-64-v4-bf16-vnni-amx",
        "x86_64",
        (*_BF16_VNNI, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        frozenset((*_V4, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")),
    ),
    Level("x86-64-v4-bf16-vnni", "x86_64", _BF16_VNNI, frozenset((*_V4, "avx512_bf16", "avx512_vnni"))),
    Level(  # Cascade Lake and Ice Lake
        "x86-64-v4-vnni",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni"),
        frozenset((*_V4, "avx512_vnni")),
    ),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), frozenset(_V4)),
    Level(  # Alder Lake and later
        "x86-64-v3-vnni",
        "x86_64",
        ("-march=x86-64-v3", "-mavxvnni"),
        frozenset((*_V3, "avx_vnni")),
    ),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), frozenset(_V3)),
    Level(  # Neoverse V1 and N2, and later
        "armv8.2-a-dotprod-i8mm-bf16",
        "aarch64",
        ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        frozenset((*_ARM_DOT, "i8mm", "bf16")),
    ),
    Level("armv8.2-a-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset(_ARM_DOT)),  # Neoverse N1
    Level("armv8-a", "aarch64", ("-march=armv8-a",), frozenset(("fp", "asimd"))),
)


def fitting(cpuinfo: str, machine: str) -> list[Level]:
    """Find the levels that every processor of a /proc/cpuinfo can run, best first."""
    pairs = (line.partition(":")[::2] for line in cpuinfo.splitlines())
    shown = [set(value.split()) for key, value in pairs if key.strip() in ("flags", "Features")]
    common = set.intersection(*shown) if shown else set()
    return [level for level in LEVELS if level.machine == machine and level.needs <= common]
