"""`python docs/generate.py` rewrites what is generated from the code. A test fails when any of it is out of date.

These are the JSON Schema of recipes, the tables of flags in cli.md and of options in methods.md, and in trust.md the
counts that `make fuzz` recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
FLAGS = re.compile(r"(<!-- flags of (\w+).*?-->\n).*?(<!-- end of flags -->)", re.DOTALL)
SECTION = re.compile(r"^### ([\w+]+)\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
ATTACK = re.compile(r"(<!-- the attack, from trust.json -->\n).*?(<!-- end of the attack -->)", re.DOTALL)
EVERYWHERE = {"json", "quiet", "debug"}


def generated() -> dict[Path, str]:
    """Every file that is generated, in whole or in part, with the text it should have."""
    from isomerge.merging.recipe.schema import FILE, text

    sources: dict[Path, Callable[[str], str]] = {
        FILE: lambda current: text(),
        DOCS / "cli.md": lambda current: FLAGS.sub(_flags_of_verb, current),
        DOCS / "methods.md": lambda current: SECTION.sub(_options_of_method, current),
        DOCS / "trust.md": lambda current: ATTACK.sub(_counts_of_attack, current),
    }
    return {path: write(path.read_text(encoding="utf-8")) for path, write in sources.items()}


def _flags_of_verb(found: re.Match[str]) -> str:
    import typer

    from isomerge.cli.app import app

    verb = typer.main.get_command(app).commands[found[2]]  # type: ignore[attr-defined]
    rows = [_flag_row(flag) for flag in verb.params if flag.name not in EVERYWHERE and flag.opts[0].startswith("-")]
    return found[1] + _table("flag", "default", "meaning", rows) + found[3]


def _flag_row(flag: Any) -> tuple[str, str, str]:
    metavar = "" if flag.is_flag else f" {flag.metavar or flag.name.upper()}"
    first, *others = [*flag.opts, *flag.secondary_opts]
    names = ", ".join([f"`{first}{metavar}`", *(f"`{name}`" for name in others)])
    default = {True: "on", False: "off"}.get(flag.default) if flag.is_flag else _shown(flag.default)
    return names, "required" if flag.required else default or "", flag.help or ""


def _options_of_method(found: re.Match[str]) -> str:
    from isomerge.merging.data_methods import ALL_METHODS
    from isomerge.merging.methods.method import REQUIRED

    rows = [
        (
            f"`{option.name}`{' (each)' if option.per_model else ''}",
            "required" if option.default is REQUIRED else "none" if option.default is None else _shown(option.default),
            option.help,
        )
        for option in ALL_METHODS[found[1]].options
    ]
    return TABLE.sub(lambda _: _table("option", "default", "meaning", rows), found[0], count=1)


def _counts_of_attack(found: re.Match[str]) -> str:
    record = json.loads((DOCS / "trust.json").read_text(encoding="utf-8"))
    keys = ("tried", "accepted", "refused", "raw", "hang", "memory", "laxer")
    lines = ["| reader | tried | accepted | refused | raw exception | over 5 s | over 1 GB | laxer than safetensors |"]
    lines.append("|---|" + "---:|" * len(keys))
    for name, row in (*record["readers"].items(), ("**all**", record["total"])):
        lines.append(f"| {name} | " + " | ".join(f"{row[key]:,}" for key in keys) + " |")
    return found[1] + "".join(f"{line}\n" for line in lines) + found[2]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else str(default)


def _table(first: str, second: str, third: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | {second} | {third} |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    for path, text in generated().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
