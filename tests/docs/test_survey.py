"""The map of the survey: every system that it names is somewhere, and every target of the map exists."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import Any

import pytest
import typer

import isomerge
import isomerge.training
from docs.blocks import ROOT
from isomerge.choices import FEDERATED_STEPS
from isomerge.cli.app import app
from isomerge.federated import aggregate
from isomerge.merging.data_methods import ALL_METHODS

SURVEY: dict[str, Any] = json.loads((ROOT / "docs" / "survey.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for table in SURVEY["tables"] for row in table["rows"]]
TARGETS = sorted({target for row in ROWS for target in row.get("by", ())})
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

IN_TABLES = {1: 4, 2: 10, 3: 11, 4: 17, 5: 11, 6: 9, 7: 9, 8: 14, 9: 7}
"""Rows of the survey's own tables, counted in the paper; choose-the-best, pre- and post-activation are one each."""


def test_every_row_of_the_survey_s_tables_is_there() -> None:
    for number, count in IN_TABLES.items():
        (table,) = [one for one in SURVEY["tables"] if f"(Table {number})" in one["title"]]
        assert len(table["rows"]) == count, table["title"]
        twice = [name for name, times in Counter(row["system"] for row in table["rows"]).items() if times > 1]
        assert not twice, f"{table['title']}: {twice}"


def test_every_system_is_here_or_planned_or_left_out_for_a_reason() -> None:
    for row in ROWS:
        assert len({"by", "planned", "left_out"} & set(row)) == 1, row
        assert row["paper"] and row.get("by", True), row
    reasons = SURVEY["reasons"]
    assert len(reasons) <= 5 and all(len(words) > 80 for words in reasons.values())
    assert {row["left_out"] for row in ROWS if "left_out" in row} == set(reasons)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_exists(target: str) -> None:
    kind, _, rest = target.partition(" ")
    name, _, part = rest.partition(" " if kind == "verb" else ".")
    if kind == "method":
        assert name in ALL_METHODS
        assert not part or part in {option.name for option in ALL_METHODS[name].options}
    elif kind == "verb":
        assert name in COMMANDS
        flag, _, value = part.partition("=")
        flags = {one: parameter for parameter in COMMANDS[name].params for one in parameter.opts}
        assert not flag or flag in flags
        assert not value or value in flags[flag].metavar.split("|")
    elif kind == "function":
        assert not part or part in inspect.signature(getattr(isomerge, name)).parameters
    elif kind == "federated":
        argument, _, value = part.partition("=")
        assert name == "aggregate" and (not part or argument in inspect.signature(aggregate).parameters)
        words = {"step": FEDERATED_STEPS, "method": ALL_METHODS, "frozen": ("head",)}
        assert not part or value in words[argument]
    else:
        assert kind == "callback" and callable(getattr(isomerge.training, name))


def test_a_method_is_in_the_map_or_newer_than_the_survey() -> None:
    mapped = {target.split()[1].partition(".")[0] for target in TARGETS if target.startswith("method ")}
    newer = SURVEY["newer"]
    assert newer == sorted(newer) and not mapped & set(newer)
    assert mapped | set(newer) == set(ALL_METHODS)
