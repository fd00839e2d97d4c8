"""Every example in a docstring runs as it stands, in a folder with the tiny models and data that it names."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import isomerge
from docs import scratch_folder
from models import image_pair
from samples import batches

PACKAGE = Path(isomerge.__file__).parent
MODULES = {
    ".".join(("isomerge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
}
for each in MODULES:  # before any example runs, so that every table is known
    importlib.import_module(each)
RECIPE = """\
merge_method: slerp
base_model: model-a
models: [{model: model-a}, {model: model-b}]
parameters: {t: 0.5}
"""


def surroundings(folder: Path, code: str) -> dict[str, Any]:
    """What examples may use without saying where it comes from: models, data, a recipe, batches."""
    kind = "text" if re.search(r"isomerge\.(moe|transplant|convert)\(", code) else "image"
    scratch_folder.set_stage(folder, kind, code)
    (folder / "recipe.yml").write_text(RECIPE)
    pixels = [batch["pixel_values"].float() for batch in batches(Path(image_pair()[0]))()]
    return {"isomerge": isomerge, "batches": lambda: iter([{"pixel_values": values} for values in pixels])}


@pytest.fixture
def tables() -> Iterator[None]:
    """What an example enters into a table of plug-ins leaves it again."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("isomerge.")]
    kept = [(value, dict(value)) for module in modules for value in vars(module).values() if type(value) is dict]
    yield
    for table, before in kept:
        if table != before:
            table.clear()
            table.update(before)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    source = MODULES[name].read_text(encoding="utf-8")
    given = surroundings(tmp_path, source) if re.search(r">>> .*(isomerge\.|batches)", source) else {}
    output: list[str] = []
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module, name, extraglobs=given):
        runner.run(test, out=output.append)
    assert runner.tries, "the module has no example that is found"
    assert not runner.failures, "".join(output)


def test_no_example_is_skipped() -> None:
    assert not [name for name, path in MODULES.items() if "doctest: +SKIP" in path.read_text(encoding="utf-8")]
