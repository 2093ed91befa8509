"""A hook of mkdocs: puts the page that ``make page`` made into the documentation, under "Try it".

The folder is the option ``extra: page`` of mkdocs.yml. Where it has not been made, the documentation has no such entry.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Link, Navigation

_PLACE = "try"


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """List the page after the first entry."""
    if _made(config) is not None:
        nav.items.insert(1, Link("Try it", f"{_PLACE}/"))
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the page beside the documentation."""
    made = _made(config)
    if made is not None:
        shutil.copytree(made, Path(config.site_dir) / _PLACE, dirs_exist_ok=True)


def _made(config: MkDocsConfig) -> Path | None:
    """Return the page's folder, if it was made."""
    folder = Path(config.config_file_path).parent / config.extra["page"]
    return folder if (folder / "index.html").exists() else None
