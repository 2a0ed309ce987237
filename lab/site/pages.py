"""The pages of the site: the repository's, at the same places, so that their links hold, and the reference."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from lab.site.reference import reference
from triptych.service.app import TABLE
from triptych.service.routes.docs import document

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".github/",)
_LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^()\s#]+)")


def write(folder: Path, version: str) -> None:
    """Write all pages, what they link to, and `mkdocs.yml` below a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    for name in page_names():
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_links((ROOT / name), pages), encoding="utf-8")
    made = reference(document(TABLE, version, True, ()))
    (pages / "reference").mkdir()
    for name, text in made.items():
        (pages / "reference" / name).write_text(text, encoding="utf-8")
    for name in ("accessible.css", "accessible.js"):
        shutil.copyfile(Path(__file__).with_name(name), folder / "pages" / name)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = "".join(f"      - reference/{name}\n" for name in made if name != "index.md")
    (folder / "mkdocs.yml").write_text(config + entries, encoding="utf-8")


def page_names() -> list[str]:
    """Return the pages of the repository, relative to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return sorted(name for name in found if not name.startswith(LEFT_OUT) and (ROOT / name).is_file())


def _with_links(page: Path, pages: Path) -> str:
    """Return a page; a folder that it links to becomes the folder's README.md, and other files are copied."""

    def fixed(match: re.Match[str]) -> str:
        target = page.parent / match[2]
        if (target / "README.md").is_file():
            return f"{match[1]}{match[2].rstrip('/')}/README.md"
        if target.is_file() and target.suffix != ".md":
            copy = pages / target.resolve().relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
        return match[0]

    return _LINK.sub(fixed, page.read_text(encoding="utf-8"))
