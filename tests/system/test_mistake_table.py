"""At least 155 plausible mistakes over every verb and the Python API: a cause, a next step, the right exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from isomerge.errors import IsomergeError, RequestError
from system.mistakes import MISTAKES
from system.zoo_of_defects import write_zoo

VERBS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing may change in it, so all mistakes share one."""
    folder, before = tmp_path_factory.mktemp("zoo"), Path.cwd()
    os.chdir(folder)
    write_zoo(folder)
    yield folder
    os.chdir(before)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(("line", "code", "says"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_met_with_its_cause_and_the_next_step(
    line: str, code: int, says: tuple[str, ...], zoo: Path
) -> None:
    before = names(zoo)
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit), "a traceback"
    message = done.stderr
    assert message.startswith("isomerge: ") and len(message.strip().splitlines()) == 1
    assert [part for part in says if part not in message] == [], message
    assert names(zoo) == before, "something was left behind"


SEEDS = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
CALLS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "merge one path": (lambda: isomerge.merge("a"), ("a list of models", "merge([a, b])")),
    "merge nothing": (lambda: isomerge.merge([]), ("models is empty", "at least two models")),
    "merge a typo": (lambda: isomerge.merge(["a", "B"]), ("Did you mean 'b'?",)),
    "merge None": (lambda: isomerge.merge(["a", None]), ("model 2 of 2 is None", "leave it out")),
    "merge a list of lists": (lambda: isomerge.merge([["a", "b"]]), ("Pass one model here, and not a list",)),
    "an unknown option": (lambda: isomerge.merge(["a", "b"], densty=1), ("densty",)),
    "weights too few": (lambda: isomerge.merge(["a", "b"], weights=[1]), ("1 values for 2 models",)),
    "weights twice": (lambda: isomerge.merge(["a", "b"], weights=[1, 2], weight=1), ("mean the same",)),
    "dtype of integers": (lambda: isomerge.merge(["a", "b"], dtype=torch.int8), ("'int8'", "dtype")),
    "level without align": (lambda: isomerge.merge(["a", "b"], level="rotation"), ("without align=True",)),
    "config of folders": (lambda: isomerge.merge(["a", "b"], config={}), ("config is that of state_dicts",)),
    "states without config, aligned": (lambda: isomerge.merge(SEEDS, align=True), ("config",)),
    "states of other names": (lambda: isomerge.merge_state_dicts([SEEDS[0], {"v": torch.ones(2)}]), ("same tensors",)),
    "states of other shapes": (lambda: isomerge.merge_state_dicts([SEEDS[0], {"w": torch.ones(3)}]), ("shapes",)),
    "a state of lists": (lambda: isomerge.merge_state_dicts([{"w": [1]}, {"w": [2]}]), ("'w' is not a tensor",)),
    "a state of words": (lambda: isomerge.check({"w": np.array(["x"])}, "a"), ("'w' is not a tensor",)),
    "align alone": (lambda: isomerge.align("a"), ("Name an anchor",)),
    "align to nowhere": (lambda: isomerge.align("a", "gone"), ("checkpoint gone", "Check the path")),
    "align by data that is unused": (lambda: isomerge.align("a", "b", data="x.txt", evidence="weights"), ("no use",)),
    "check one": (lambda: isomerge.check("a"), ("at least two models", "check(a, b)")),
    "check data for three": (lambda: isomerge.check("a", "b", data=["x.txt"] * 3), ("3 data sets for 2 models",)),
    "evaluate two": (lambda: isomerge.evaluate(["a", "b"], "x.txt"), ("not a list",)),
    "evaluate without data": (lambda: isomerge.evaluate("a"), ("needs data",)),
    "evaluate a batch size as text": (lambda: isomerge.evaluate("a", "x.txt", batch_size="8"), ("batch_size",)),
    "barrier with both": (lambda: isomerge.barrier("a", "b", loss=abs, data="x.txt"), ("either loss", "not both")),
    "plane of a line": (
        lambda: isomerge.plane("a", "a", "b", loss=lambda module: 0.0, points=2), ("on one line", "Use barrier")
    ),
    "sweep without data": (lambda: isomerge.sweep("slerp.yml", {"t": [0]}), ("loss=function",)),
    "sweep over a number": (lambda: isomerge.sweep("slerp.yml", 3, data="x.txt"), ("over",)),
    "sweep a recipe and a method": (
        lambda: isomerge.sweep("slerp.yml", {"t": [0]}, method="ties", data="x.txt"), ("says its method",)
    ),
    "sweep models that are none": (lambda: isomerge.sweep([1, 2], {"t": [0]}, data="x.txt"), ("a list of models",)),
    "progress as text": (lambda: isomerge.evaluate("a", "x.txt", progress="yes"), ("progress must be",)),
    "calibrate nothing": (lambda: isomerge.calibrate("a", "x.txt", what=()), ("what",)),
    "a recipe of numbers": (lambda: isomerge.merge_recipe(3), ("a path, YAML text or a dict",)),
    "models a recipe does not name": (
        lambda: isomerge.merge_recipe("good.yml", models={"c": "a"}), ("does not name", "Known values: a, b")
    ),
    "save over an input": (lambda: isomerge.merge(["a", "b"]).save("a"), ("never modified", "elsewhere")),
    "save over a file": (lambda: isomerge.merge(["a", "b"]).save("x.txt"), ("a file and not a folder",)),
    "verify a number": (lambda: isomerge.verify(3), ("folder must be",)),
    "a catalogue of models": (lambda: isomerge.catalogue("models"), ("Did you mean 'methods'?",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_in_python_names_its_argument_and_no_flag(name: str, zoo: Path) -> None:
    call, says = CALLS[name]
    before = names(zoo)
    with pytest.raises(IsomergeError) as refused:
        call()
    message = str(refused.value)
    assert isinstance(refused.value, RequestError) or "not a tensor" in message
    assert [part for part in says if part not in message] == [], message
    assert " --" not in message and names(zoo) == before


def test_there_are_enough_of_them_over_every_verb() -> None:
    assert len(MISTAKES) + len(CALLS) >= 155 and len({line for line, _, _ in MISTAKES}) == len(MISTAKES)
    assert {line.split()[0] for line, _, _ in MISTAKES} >= VERBS
