"""Docstrings as pages: an example that starts with `>>>` becomes a block of code; Markdown would make it a quote."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*(?:\n(?!\s*$).*)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Every example between fences, without the marks that are for the tests."""
    plain = re.sub(r" *# doctest: \+\w+", "", text)
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", plain)


class Examples(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
