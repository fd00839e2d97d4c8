"""The guides that add something are followed to the letter, in a copy of the source.

The file goes where the guide says, the line into the table that it names, and what comes after is run. Nothing else is
changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from docs.blocks import ROOT, blocks_of

GUIDES = ROOT / "docs" / "guides"


@dataclass
class Copy:
    """A copy of the source, and one guide."""

    place: Path
    guide: Path

    @property
    def text(self) -> str:
        return self.guide.read_text(encoding="utf-8")

    @property
    def programs(self) -> list[str]:
        """The blocks of Python, in order: the first is the file, the others use it."""
        return [block.code for block in blocks_of(self.guide) if block.language == "python"]

    def write_file(self, folder: str, name: str) -> None:
        assert f"`{folder}`" in self.text, f"the guide does not say that the file goes into {folder}"
        target = self.place / folder / name
        assert not target.exists()
        target.write_text(self.programs[0], encoding="utf-8")

    def run(self, code: str) -> None:
        self.start("-c", code)

    def listed(self, kind: str) -> dict[str, Any]:
        """What `isomerge list` says of each entry, by name."""
        found = json.loads(self.start("-m", "isomerge", "list", kind, "--json"))
        return {entry["name"]: entry for entry in found[kind]}

    def start(self, *words: str) -> str:
        paths = os.pathsep.join(str(self.place / part) for part in ("src", "tests"))
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture
def copy_with(tmp_path: Path) -> Any:
    shutil.copytree(ROOT / "src" / "isomerge", tmp_path / "src" / "isomerge", ignore=shutil.ignore_patterns("*.pyc"))
    return lambda name: Copy(tmp_path, GUIDES / name)


@pytest.mark.slow
def test_add_an_architecture(copy_with: Any) -> None:
    copy = copy_with("add-an-architecture.md")
    copy.write_file("src/isomerge/architectures/", "jais2.py")
    assert "jais2" in str(copy.listed("architectures"))
    copy.run("\n".join(copy.programs[1:]))


@pytest.mark.slow
def test_the_row_of_a_new_architecture_buys_every_generic_test(copy_with: Any) -> None:
    copy = copy_with("add-an-architecture.md")
    copy.write_file("src/isomerge/architectures/", "jais2.py")
    for name in ("tests", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy.place / name)
    (row,) = re.findall(r"`(row\(.*?\))`", copy.text)
    (table,) = re.findall(r"one row to the table in `(\S+)`", copy.text)
    with (copy.place / table).open("a") as file:
        file.write(f"\n{row}\n")
    select = ["-k", "jais2", "tests/architectures", "-p", "no:cacheprovider", "-q"]
    told = copy.start("-m", "pytest", *select)
    passed = int(re.search(r"(\d+) passed", told)[1])  # type: ignore[index]
    for claim in ("sound", "recovers", "native"):
        assert f"*{claim}*" in copy.text
    assert passed >= 3


@pytest.mark.slow
def test_add_a_method(copy_with: Any) -> None:
    copy = copy_with("add-a-method.md")
    copy.write_file("src/isomerge/merging/methods/", "halfway.py")
    assert "halfway" in copy.listed("methods")
    copy.run("\n".join(copy.programs[1:]))
    assert "`python docs/generate.py`" in copy.text
    shutil.copytree(ROOT / "docs", copy.place / "docs", ignore=shutil.ignore_patterns("images", "results"))
    copy.start("docs/generate.py")
    assert "halfway" in (copy.place / "src/isomerge/merging/recipe/schema.json").read_text()


@pytest.mark.slow
def test_add_a_solver(copy_with: Any) -> None:
    copy = copy_with("add-a-solver.md")
    copy.write_file("src/isomerge/alignment/solvers/", "cyclic_shift.py")
    module = "isomerge.alignment.solvers.cyclic_shift"
    (table,) = re.findall(r"`SOLVERS`\s+of\s+`(src/\S+\.py)`", copy.text)
    (line,) = re.findall(r"`(\"cyclic.shift\": .+?)`", copy.text)
    source = (copy.place / table).read_text()
    used = [name for name in re.findall(r"^def (\w+)", copy.programs[0], re.MULTILINE) if name in line.split(":", 1)[1]]
    entry = f"SOLVERS: {re.search(r'SOLVERS: (.*) = {', source)[1]} = {{\n"  # type: ignore[index]
    source = source.replace(entry, f"{entry}    {line.rstrip(',')},\n")
    if used:
        source = source.replace("\nfrom torch", f"\nfrom {module} import {', '.join(used)}\nfrom torch", 1)
    (copy.place / table).write_text(source)
    assert eval(line.split(":")[0]) in copy.listed("solvers")
    copy.run("\n".join([f"from {module} import *", *copy.programs[1:]]))
    copy.start("-m", "doctest", str(copy.place / "src/isomerge/alignment/solvers/cyclic_shift.py"))
