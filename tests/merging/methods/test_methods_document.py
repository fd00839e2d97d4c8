"""docs/methods.md tells of every method and every option what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods import Option
from isomerge.merging.methods.method import REQUIRED

DOCUMENT = (Path(__file__).parents[3] / "docs" / "methods.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### ([\w+]+)\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL))


def shown(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def row(option: Option) -> str:
    return f"| `{option.name}`{' (each)' if option.per_model else ''} | {shown(option.default)} | {option.help} |"


def test_the_document_has_a_section_for_every_method_and_for_nothing_else() -> None:
    assert sorted(SECTIONS) == sorted(ALL_METHODS)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_the_section_has_the_summary_the_formula_and_the_options(name: str) -> None:
    section, method = SECTIONS[name], ALL_METHODS[name]
    assert method.summary in section
    assert method.reference in section
    for part in ("Formula: ", "Use: ", "Differences: "):
        assert len(re.findall(f"^{part}\\S", section, re.MULTILINE)) == 1, part
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(option) for option in method.options]
