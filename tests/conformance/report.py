"""Counts the cases of an area and compares failures with the list of known ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

KNOWN = Path(__file__).parent / "known.toml"
_SHOWN = 300  # characters of a reason


@dataclass
class Report:
    """The cases of one area. A case is a short, stable name: it is what known.toml lists."""

    area: str
    passed: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def passes(self, case: str) -> None:
        """Count a case that equals the reference."""
        self.passed += 1

    def refuses(self, case: str, reason: str) -> None:
        """Count a case that is refused with a true reason, which is allowed and listed separately."""
        self.refused[case] = reason

    def fails(self, case: str, reason: str) -> None:
        """Record a case that differs from the reference."""
        self.failures[case] = " ".join(str(reason).split())[:_SHOWN]

    def check(self, case: str, equal: bool, reason: str = "differs") -> None:
        """Record a case by its outcome."""
        if equal:
            self.passes(case)
        else:
            self.fails(case, reason)


def read_known(path: Path = KNOWN) -> dict[str, dict[str, str]]:
    """Return the known failures: for each area, a pattern of cases (fnmatch) and the reason."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def surprises(report: Report, known: Mapping[str, str]) -> list[str]:
    """Return lines for unknown failures, and for known ones that no longer fail: the list only shrinks."""
    unknown = [
        f"{report.area}: {case}: {reason}"
        for case, reason in report.failures.items()
        if not any(fnmatchcase(case, pattern) for pattern in known)
    ]
    stale = [
        f"{report.area}: known.toml lists {pattern!r}, which fails no longer: remove it"
        for pattern in known
        if not any(fnmatchcase(case, pattern) for case in report.failures)
    ]
    return unknown + stale
