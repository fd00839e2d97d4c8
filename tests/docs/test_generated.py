"""Tables and files that are generated from the code are up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_what_is_generated_is_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    outdated = [path.name for path, text in module.generated().items() if path.read_text(encoding="utf-8") != text]
    assert not outdated, "run: python docs/generate.py"


def test_every_verb_has_a_section_with_its_flags() -> None:
    import typer

    from isomerge.cli.app import app

    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([\w-]+)$", text, re.MULTILINE)
    tables = re.findall(r"<!-- flags of ([\w-]+)", text)
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(sections) == set(verbs)
    assert set(tables) == {name for name in verbs if name != "list"}  # list has an argument and no flags
