"""What installs isomerge elsewhere agrees with what is here: Dockerfile, conda recipe, the notebook's first cell.

`make package` builds and installs the package itself.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTRUCTIONS = [
    (words[0], words[1:])
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for words in [line.split(maxsplit=1)]
]


def instructions(kind: str) -> list[str]:
    return [text for name, (text,) in INSTRUCTIONS if name == kind]


def test_the_dockerfile_copies_files_that_are_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [name for text in instructions("COPY") if "--from" not in text for name in text.split()[:-1]]
    assert {"pyproject.toml", "src", "constraints.txt"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists() and f"!{name}" in ignored, name
    needed = {PROJECT["readme"], *PROJECT["license-files"]}
    assert needed <= set(sources), "the wheel is built from these"


def test_the_dockerfile_builds_and_installs_as_make_package_does() -> None:
    commands = " && ".join(instructions("RUN"))
    tried = (ROOT / "tests" / "packaging" / "run_package.py").read_text(encoding="utf-8")
    assert "python -m build --wheel" in commands and '"-m", "build"' in tried
    assert "isomerge --version" in commands and '"--version"' in tried
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", commands)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    pattern = re.search(r"grep (\S+) ", commands)
    assert pattern and re.search(pattern[1], (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert json.loads(instructions("ENTRYPOINT")[0])[0] in PROJECT["scripts"]
    (image,) = {text.split()[0] for text in instructions("FROM")}
    version = image.removeprefix("python:").removesuffix("-slim")
    assert f'"{version}"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text(), "a Python that is tested"


def test_the_conda_recipe_asks_for_what_pyproject_asks_for() -> None:
    path = ROOT / "packaging" / "conda" / "meta.yaml"

    def load_file_data(name: str, from_recipe_dir: bool) -> dict[str, Any]:
        assert from_recipe_dir
        return tomllib.loads((path.parent / name).read_text(encoding="utf-8"))

    text = jinja2.Template(path.read_text(encoding="utf-8")).render(load_file_data=load_file_data)
    recipe = yaml.safe_load(text)
    assert recipe["package"] == {"name": "isomerge", "version": PROJECT["version"]}
    assert recipe["about"]["license"] == PROJECT["license"] and (ROOT / recipe["about"]["license_file"]).exists()
    assert (path.parent / recipe["source"]["path"] / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    scripts = dict(line.split(" = ") for line in recipe["build"]["entry_points"])
    assert scripts == PROJECT["scripts"]
    wanted = [one.partition(";")[0] for one in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["hf"]]
    run = recipe["requirements"]["run"]
    assert run[0] == f"python {PROJECT['requires-python']}"
    assert [one.replace(" ", "").replace("pytorch", "torch") for one in run[1:]] == [w.replace(" ", "") for w in wanted]
    for command in recipe["test"]["commands"]:
        assert shlex.split(command)[0] in scripts


@pytest.mark.parametrize(
    ("here", "package"),
    [
        ((), "isomerge"),
        (("isomerge-0.2.0-py3-none-any.whl",), "isomerge-0.2.0-py3-none-any.whl"),
        (("src/isomerge/x",), ""),
    ],
)
def test_the_notebook_installs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], package: str
) -> None:
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    for name in here:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
    exec(code, {})
    assert commands == []  # it is installed here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(code, {})
    (command,) = commands
    wanted = f"{tmp_path / package if here else package}[hf,demo,report]"
    assert command == [sys.executable, "-m", "pip", "install", "--quiet", wanted]
    extras = re.findall(r"\w+", wanted.rpartition("[")[2])
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
