"""Builds the documentation site into build/site: the pages of docs/, and those made from the catalogue and the code.

make docs
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a test runs this file from elsewhere

from site_api import write_api
from site_families import write_families
from tables_base import ROOT

CONTENTS = {
    "Begin": ["docs/first_steps", "docs/lectures", "docs/glossary"],
    "Tutorials": [f"docs/tutorial_{name}" for name in ("data", "run", "code", "huggingface", "mechanism", "compare")],
    "Mechanisms": [],  # a page for each family
    "Use": ["docs/training", "docs/compare", "docs/arena", "docs/advise"],
    "Models of others": ["docs/huggingface", "docs/huggingface_conversion", "docs/weights"],
    "Facts": ["README", "docs/numbers", "DESIGN", "CONTRIBUTING", "CHANGELOG"],
    "API": [],  # a page for each public package
}


def copy_pages(folder: Path) -> None:
    """Lay out files as in the repository, so that links between them hold; results and examples are downloads."""
    for pattern in ("*.md", "docs/*.md", "docs/*.png", "results/*.json", "examples/*.py"):
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def contents() -> dict[str, list[str]]:
    """The lists of the first page; a page of docs/ that none of them names is among those of use."""
    listed = [page for pages in CONTENTS.values() for page in pages]
    found = [f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))]
    return CONTENTS | {"Use": CONTENTS["Use"] + [page for page in found if page not in listed]}


def index_page(lists: dict[str, list[str]]) -> str:
    """Write the first page: what the library is, and lists of all others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = readme.split("\n\n")[1]
    parts = ["# regard", first]
    for caption, pages in lists.items():
        parts.append(f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n" + "\n".join(pages) + "\n```")
    return "\n\n".join(parts) + "\n"


def write_site(folder: Path) -> None:
    """Write all pages into a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    copy_pages(folder)
    families = [f"families/{name}" for name in write_families(folder / "families")]
    packages = [f"api/{name}" for name in write_api(folder / "api")]
    lists = contents() | {"Mechanisms": families, "API": packages}
    (folder / "index.md").write_text(index_page(lists), encoding="utf-8")


def main() -> int:
    """Write the pages and build them; a warning is an error."""
    from sphinx.cmd.build import main as sphinx

    pages, site = ROOT / "build" / "pages", ROOT / "build" / "site"
    write_site(pages)
    shutil.rmtree(site, ignore_errors=True)
    folders = ["-d", str(ROOT / "build" / "doctrees"), "-c", str(ROOT / "docs"), str(pages), str(site)]
    failed = sphinx(["-W", "--keep-going", "-q", "-E", *folders])
    print(f"{site / 'index.html'}" if not failed else "the site has warnings, which are errors")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
