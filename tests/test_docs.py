"""The pages of documentation: their links lead somewhere, and none is too long to read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 400  # lines of a page
LINK = re.compile(r"\]\((?!https?://|mailto:)([^()\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)


def pages() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    return sorted(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


PAGES = pages() if (ROOT / ".git").exists() else []


def anchor(heading: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = FENCE.sub("", path.read_text())
    return {anchor(line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken(page: str) -> list[str]:
    """Return the links of a page that lead to no file or heading."""
    path, found = ROOT / page, []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        name, _, wanted = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (wanted and target.suffix == ".md" and wanted not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_each_link_leads_to_a_file_and_a_heading(page: str) -> None:
    assert broken(page) == []


def test_control_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A `b` c\n\n[x](#a-b-c) [y](#a) [z](b.md) [w](https://example.com)\n")
    assert broken(str(tmp_path / "a.md")) == ["#a", "b.md"]


def test_no_page_is_too_long_to_read() -> None:
    lines = {page: len((ROOT / page).read_text().splitlines()) for page in PAGES}
    assert {page: count for page, count in lines.items() if count > LONGEST} == {}


PATH = re.compile(r"(?<![\w/.-])(?:deploy|examples|lab|loadtest|model|service|tests)/[\w./-]*\w(?![\w*])")
OF_NOW = [page for page in PAGES if not page.startswith(("docs/archive/", "docs/decisions/", "CHANGELOG", "tests/"))]


@pytest.mark.parametrize("page", OF_NOW)
def test_each_path_of_the_repository_that_a_page_names_is_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text())
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("package", ["model", "service"])
def test_the_map_of_the_code_has_every_folder(package: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for kind in ("py", "html") for path in (ROOT / package).glob(f"*/*.{kind}")}
    assert sorted(name for name in folders if f"`{name}/" not in text) == []
