"""Just enough of a shell for the commands in the documents: comments, `&&`, `;`, `>` and continued lines.

`isomerge` and the scripts in examples/ run in this process, where torch is loaded already. Other programs are only
looked at: is there such a make target, extra or script, and does it have these flags?
"""

from __future__ import annotations

import functools
import itertools
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from docs.blocks import ROOT
from isomerge.cli.app import app

VERBS_AS_PROGRAMS = (
    "mergekit-yaml", "mergekit-multi", "mergekit-moe", "mergekit-tokensurgeon", "mergekit-extract-lora",
)  # fmt: skip
PROGRAMS = ("isomerge", *VERBS_AS_PROGRAMS, "make", "pip", "python", ".")
OUTPUTS = ("-o", "--out", "--out-path", "--recipe")
PLACEHOLDER = re.compile(r"…|\[|\||^[A-Z][A-Z_-]*(\.\w+)?$|^ORG/NAME$")
"""A word that stands for another one: such a line is a form and not a command."""


def commands(code: str) -> Iterator[tuple[list[str], str | None]]:
    """Every command as its words, and the file its output goes to; a verb that is a program is a verb."""
    for words, into in _commands(code):
        yield (["isomerge", *words] if words[0] in VERBS_AS_PROGRAMS else words), into


def _commands(code: str) -> Iterator[tuple[list[str], str | None]]:
    for line in code.replace("\\\n", " ").replace("'s ", "’s ").splitlines():  # in a form, no quotation begins there
        words = shlex.shlex(line, posix=True, punctuation_chars="&;>")
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("&&", ";"):
                if command:
                    yield _redirected(command)
                command = []
            else:
                command.append(word)


def _redirected(words: list[str]) -> tuple[list[str], str | None]:
    return (words[:-2], words[-1]) if len(words) > 2 and words[-2] == ">" else (words, None)


def is_form(words: list[str]) -> bool:
    """Whether words stand for others: capital ones, and addresses."""
    return any(PLACEHOLDER.search(word) or "://" in word for word in words)


def run(words: list[str], into: str | None = None, *, anew: bool = False) -> None:
    """Run `isomerge`; `anew`: what another command has written there makes room."""
    outputs = [Path(value) for flag, value in itertools.pairwise(words) if flag in OUTPUTS]
    if words[1] in ("merge", "mergekit-yaml") and len(words) > 3 and words[2].endswith(".yml") and words[3][0] != "-":
        outputs.append(Path(words[3]))
    for path in outputs if anew else ():
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{shlex.join(words)} ended with {done.exit_code}:\n{done.output}"
    for path in outputs:
        assert path.exists(), f"{shlex.join(words)}: no {path}"
    if into:
        Path(into).write_text(done.stdout)


def look(words: list[str]) -> None:
    """Only ask whether what a command names is there."""
    program, *rest = words
    looks = {"isomerge": require_form, "make": _make, "pip": _pip, "python": _python, ".": _activate}
    assert program in looks, f"no test knows how to run {program}"
    looks[program](rest)


def run_example(words: list[str]) -> None:
    """Run a script of examples/, with its arguments."""
    before, sys.argv = sys.argv, words
    try:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    finally:
        sys.argv = before


@functools.cache
def verbs() -> dict[str, set[str]]:
    """The flags of every verb; a method's options are flags of `merge`, `plan` and their like."""
    from isomerge.merging.data_methods import ALL_METHODS

    own = {option.name.replace("_", "-") for method in ALL_METHODS.values() for option in method.options}
    options = {f"--{name}" for name in own} | {f"--no-{name}" for name in own} | {"--weights"}
    found: dict[str, set[str]] = {}
    group: Any = typer.main.get_command(app)
    for name, verb in group.commands.items():
        flags = {flag for parameter in verb.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        free = verb.context_settings.get("ignore_unknown_options", False)
        found[name] = flags | {"--help"} | (options if free else set())
    return found


@functools.cache
def examples() -> dict[str, str]:
    """The example that ends the help of every verb."""
    group: Any = typer.main.get_command(app)
    return {name: verb.epilog.removeprefix("Example: ") for name, verb in group.commands.items()}


def require_form(words: list[str]) -> None:
    """The verb and its flags exist, whatever stands for the rest."""
    if not words or words[0].startswith("-") or PLACEHOLDER.search(words[0]):
        return
    assert words[0] in verbs(), f"there is no verb {words[0]}"
    for flag in re.findall(r"(?<![\w-])--?[a-z][a-z\d-]*", " ".join(words[1:])):
        assert flag in verbs()[words[0]], f"isomerge {words[0]} has no flag {flag}"


def _make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"


def _pip(words: list[str]) -> None:
    assert words[0] == "install", words
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for extra in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        for name in extra.split(","):
            assert re.search(rf"^{name} = ", text, re.MULTILINE), f"pyproject.toml has no extra {name}"


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        module = words[1].replace(".", "/")
        places = [ROOT / "src" / f"{module}.py", ROOT / "src" / module / "__main__.py"]
        assert words[1] in ("venv", "pip") or any(place.exists() for place in places), f"there is no module {words[1]}"
        return
    script = ROOT / words[0]
    assert script.exists(), f"there is no {words[0]}"
    beside = "".join(file.read_text() for file in script.parent.glob("*.py"))
    for flag in (word for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in beside, f"{words[0]} has no flag {flag}"


def _activate(words: list[str]) -> None:
    assert words[0].endswith("/bin/activate")
