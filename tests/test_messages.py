"""Messages of the library name arguments; flags are the command line's, and stand elsewhere only in whole commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from isomerge.cli.app import app
from isomerge.merging.data_methods import ALL_METHODS

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "isomerge"

# A quote before the dashes makes them a property of CSS.
FLAG = re.compile(r'(?<![\w"-])(--[a-z]|-[a-z]\b)')
# A command starts with a program and a subcommand or flag, and ends where the sentence or the bracket around it does.
COMMAND = re.compile(r"\b(isomerge|hf|iconv|pip) (-?[a-z]+)[^,;)`\n]*?(?=[,;)`\n]|\.\s|\.?$)")
# A flag alone is a word of a command that is put together from a list.
WORD = re.compile(r"--?[a-z-]+")
ARGUMENT = re.compile("`([a-z_]+)`")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every text of a module but its docstrings, with {} for what an f-string fills in."""
    tree = ast.parse(source)
    passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed |= {id(value) for value in node.values}
            yield node.lineno, "".join(str(getattr(value, "value", "{}")) if isinstance(value, ast.Constant) else "{}"
                                       for value in node.values)  # fmt: skip
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.lineno, node.value


def names_a_flag(text: str) -> bool:
    return not WORD.fullmatch(text) and bool(FLAG.search(COMMAND.sub("", text)))


@cache
def library() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(PACKAGE)}:{line}", text)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "cli" not in path.relative_to(PACKAGE).parts
        for line, text in texts(path.read_text())
    ]


def test_the_library_names_no_flags() -> None:
    assert [(place, text) for place, text in library() if names_a_flag(text)] == []


@pytest.mark.parametrize(
    ("source", "is_flag"),
    [
        ('raise RequestError(f"{act}: it is there. Set --force.")', True),
        ('note = "name a folder with -o"', True),
        ('note = "see isomerge check. Then set --base"', True),
        ('note = f"{name}: --out-dtype {dtype} keeps them"', True),
        ('note = "make one (isomerge barrier A B --json > curve.json), with --force"', True),
        ('note = "make one: isomerge barrier A B --json > curve.json"', False),
        ('parts += ["--base", base]', False),
        ('"""Explains --force."""', False),
        ('style = "width: 3px; a-b"', False),
    ],
)
def test_flags_are_told_from_commands(source: str, is_flag: bool) -> None:
    assert any(names_a_flag(text) for _, text in texts(source)) is is_flag


def test_arguments_in_backticks_are_flags_of_the_command_line() -> None:
    """`text.as_flags` writes them so."""
    verbs = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    flags = {flag for verb in verbs for option in verb.params for flag in option.opts}
    flags |= {"--" + option.name.replace("_", "-") for method in ALL_METHODS.values() for option in method.options}
    named = {name for _, text in library() for name in ARGUMENT.findall(text)}
    assert named and {"--" + name.replace("_", "-") for name in named} <= flags
