"""What mkdocs does for this site beside its own: a section with every page of a folder, and nothing from elsewhere.

An entry of the navigation that ends in a slash becomes a section with the pages of that folder, and is left out where
there are none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

OUTSIDE = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+rel=\"?stylesheet\"?[^>]+href=\"?https?:")


def on_config(config: Any) -> Any:
    config["nav"] = _filled(config["nav"], Path(config["docs_dir"]))
    return config


def _filled(entries: list[Any], docs: Path) -> list[Any]:
    found = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            found.append({title: _filled(target, docs)})
        elif target.endswith("/"):
            pages = sorted((docs / target).glob("*.md"), key=lambda path: (path.stem != "index", path.name))
            found += [{title: [page.relative_to(docs).as_posix() for page in pages]}] if pages else []
        else:
            found.append(entry)
    return found


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The site must work without a network, and tell nobody who reads it."""
    loaded = OUTSIDE.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {loaded[0]}")
    return output
