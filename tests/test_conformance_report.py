"""The report of `make conformance` names unknown failures, and known failures that no longer fail."""

from tests.conformance.report import Report, read_known, surprises


def test_surprises_are_unknown_failures_and_stale_entries() -> None:
    report = Report("templates")
    report.passes("a")
    report.check("b: tools", False, "differs in line 3")
    report.fails("c", "refused")
    assert surprises(report, {"b:*": "a reason", "d": "mended"}) == [
        "templates: c: refused",
        "templates: known.toml lists 'd', which fails no longer: remove it",
    ]
    assert (report.passed, len(report.failures)) == (1, 2)


def test_known_list_reads_and_gives_reasons() -> None:
    for area, entries in read_known().items():
        assert entries and all(len(reason) > 20 for reason in entries.values()), area
