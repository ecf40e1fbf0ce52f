"""Prepares a copy of the source tree for a package index: ``python -m tests.support.published FOLDER URL``.

The page of a package index shows README.md without the files beside it, so its links have to be absolute.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def absolute_links(text: str, url: str) -> str:
    """Links of a page at the root of the repository ``url``, as absolute links to its branch ``main``."""
    return _RELATIVE.sub(rf"]({url.rstrip('/')}/blob/main/\1)", text)


def main(folder: Path, url: str) -> None:
    """Make the links of README.md absolute, and add the project's URLs to pyproject.toml.

    Raises:
        ValueError: ``url`` is no https address.
    """
    if not url.startswith("https://"):
        raise ValueError(f"PROJECT_URL is {url!r}; it must be the https address of the repository")
    readme = folder / "README.md"
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), url), encoding="utf-8")
    urls = {"Repository": "", "Documentation": "/blob/main/docs/index.md", "Changelog": "/blob/main/CHANGELOG.md"}
    lines = [f'{name} = "{url.rstrip("/")}{path}"' for name, path in urls.items()]
    with (folder / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("\n[project.urls]\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
