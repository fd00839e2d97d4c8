"""What a terminal shows: help of a method, one entry of a list, long paths from their common folder on."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isomerge.choices import method_options
from isomerge.cli.short_paths import shortened
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods.method import REQUIRED


@pytest.mark.parametrize("line", ["-h", "merge -h", "mergekit-yaml -h", "list -h"])
def test_h_is_help(run: Any, line: str) -> None:
    assert run(line).stdout == run(line.replace("-h", "--help")).stdout


def test_options_are_read_from_the_schema_as_the_methods_declare_them() -> None:
    """The schema is what the command line can read without torch."""
    for name, method in ALL_METHODS.items():
        found = {option.name: option for option in method_options(name)}
        assert list(found) == [option.name for option in method.options]
        for option in method.options:
            entry = found[option.name]
            assert (entry.help, entry.each, entry.required) == (
                option.help,
                option.per_model,
                option.default is REQUIRED,
            )
            assert entry.required or entry.default == option.default
            assert {"number": float, "integer": int, "boolean": bool, "string": str}[entry.kind] is option.kind


@pytest.mark.parametrize("line", ["merge --help --method ties", "merge --method=ties -h", "plan -h --method ties"])
def test_the_help_shows_the_options_of_the_method(run: Any, line: str) -> None:
    shown = run(line).stdout.partition("Options of ties:")[2]
    for option in method_options("ties"):
        assert f"--{option.name.replace('_', '-')} " in shown and option.help.split()[0] in shown


def test_the_help_refuses_a_method_that_is_not_there(run: Any) -> None:
    done = run("merge --help --method tiess")
    assert done.exit_code == 2 and "Did you mean 'ties'?" in done.stderr


def test_a_list_shows_one_line_each_at_80_columns() -> None:
    import isomerge
    from isomerge.reporting.terminal import catalogue_table

    for kind in ("methods", "architectures", "solvers", "combinations"):
        rows, page = isomerge.catalogue(kind), io.StringIO()
        Console(file=page, width=80).print(catalogue_table({kind: rows}))
        lines = page.getvalue().splitlines()
        assert [line[: len(row.name)] for line, row in zip(lines, rows, strict=True)] == [row.name for row in rows]
        assert all(len(line) <= 80 for line in lines)


def test_a_name_shows_everything_about_it(run: Any) -> None:
    shown = run("list methods ties").stdout
    assert all(word in shown for word in ("base", "required", "arxiv.org/abs/2306.01708", "density", "default: 1.0"))
    record = json.loads(run("list methods ties --json").stdout)
    assert [option["name"] for option in record["options"]] == [option.name for option in ALL_METHODS["ties"].options]
    assert "orthogonal Procrustes" in run("list solvers rotation").stdout
    wrong = run("list methods tie")
    assert wrong.exit_code == 2 and "Did you mean 'ties'?" in wrong.stderr


def test_long_paths_are_shown_from_their_common_folder_on(tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-with-a-long-name"
    for name in ("a", "b", "merged"):
        (folder / name).mkdir(parents=True)
    a, b, out = (str(folder / name) for name in ("a", "b", "merged"))
    record = {
        "models": [a, b],
        "out": Path(out),
        "notes": [f"{a} is near {b}"],
        "recipe": f"model: {a}",
        "bytes": 3,
    }
    shown, common = shortened(record)
    assert common == str(folder)
    assert shown == {
        "models": ["…/a", "…/b"], "out": "…/merged", "notes": ["…/a is near …/b"],
        "recipe": f"model: {a}",  # is copied
        "bytes": 3,
    }  # fmt: skip


def test_short_paths_hub_ids_and_words_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("models/a")
    record = {"models": ["models/a", "organisation/name-of-a-model"], "method": "linear", "none": None}
    assert shortened(record) == (record, None)
