"""`python docs/generate.py` rewrites what is generated from the code. A test fails when any of it is out of date.

These are the JSON Schema of recipes, the tables of flags in cli.md and of options in methods.md, in trust.md the counts
that `make fuzz` and `make fuzz-faults` recorded, and in survey.md the map of survey.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
FLAGS = re.compile(r"(<!-- flags of ([\w-]+).*?-->\n).*?(<!-- end of flags -->)", re.DOTALL)
SECTION = re.compile(r"^### ([\w+]+)\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
ATTACK = re.compile(r"(<!-- the attack, from trust.json -->\n).*?(<!-- end of the attack -->)", re.DOTALL)
FAULTS = re.compile(r"(<!-- the faults, from faults.json -->\n).*?(<!-- end of the faults -->)", re.DOTALL)
MAP = re.compile(r"(<!-- the map, from survey.json -->\n).*?(<!-- end of the map -->)", re.DOTALL)
EVERYWHERE = {"json", "quiet", "debug"}


def generated() -> dict[Path, str]:
    """Every file that is generated, in whole or in part, with the text it should have."""
    from isomerge.merging.recipe.schema import FILE, text

    sources: dict[Path, Callable[[str], str]] = {
        FILE: lambda current: text(),
        DOCS / "cli.md": lambda current: FLAGS.sub(_flags_of_verb, current),
        DOCS / "methods.md": lambda current: SECTION.sub(_options_of_method, current),
        DOCS / "survey.md": lambda current: MAP.sub(_map_of_survey, current),
        DOCS / "trust.md": lambda current: FAULTS.sub(_counts_of_faults, ATTACK.sub(_counts_of_attack, current)),
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
    lines += ["", *_about_attack(record)]
    return found[1] + "".join(f"{line}\n" for line in lines) + found[2]


def _about_attack(record: dict[str, Any]) -> list[str]:
    seeds = sorted({seed for row in record["readers"].values() for seed in row["seed"]})
    ran = _ran_with([*record.get("before", []), record])
    lines = [f"{len(seeds)} seeds, {record['seconds'] / 60:,.0f} minutes of one core{ran}."]
    lines += [f"Not run: {name} ({why})." for name, why in record.get("not_run", {}).items()]
    drawn = record.get("architectures", [])
    if drawn:
        counted = {key: sum(one[key] for one in drawn) for key in ("configurations", "moved", "aligned", "controls")}
        lines += [
            "",
            f"Beside the files, {counted['configurations']:,} configurations of {_families(drawn)} families were "
            f"drawn, with sizes that nobody uses. {counted['moved']:,} models were moved at random and "
            f"{counted['aligned']:,} aligned; in float64 their outputs differ by at most "
            f"{max(one['largest_difference'] for one in drawn):.0e} of the largest output. Of "
            f"{counted['controls']:,} wrong transforms, each changed the outputs by at least "
            f"{min(one['smallest_control'] for one in drawn):.0e}. "
            f"Failures: {sum(len(one['failures']) for one in drawn)}.",
        ]
    return lines


def _families(drawn: list[dict[str, Any]]) -> int:
    return len({family for one in drawn for family in one["families"]})


def _counts_of_faults(found: re.Match[str]) -> str:
    commands = json.loads((DOCS / "faults.json").read_text(encoding="utf-8"))["commands"]
    lines = ["| command | I/O calls | faults tried | of all | disks they left | problems |", "|---|" + "---:|" * 5]
    for name, one in commands.items():
        tried = "all" if one["exhaustive"] else f"{one['faults'] / one['possible']:.1%}"
        disks = f"{one['reruns']:,}" if "reruns" in one else "not counted"
        lines.append(f"| {name} | {one['calls']:,} | {one['faults']:,} | {tried} | {disks} | {len(one['problems'])} |")
    calls, faults = (sum(one[key] for one in commands.values()) for key in ("calls", "faults"))
    problems = sum(len(one["problems"]) for one in commands.values())
    lines.append(f"| **all** | {calls:,} | {faults:,} | | | {problems} |")
    after, before = (
        sum(one["outcomes"].get(key, 0) for one in commands.values())
        for key in ("finished by the same command", "finished before the fault")
    )
    lines += [
        "",
        f"{after:,} times the same command finished the work, {before:,} times the model was complete before the fault"
        f"{_ran_with(list(commands.values()))}.",
    ]
    return found[1] + "".join(f"{line}\n" for line in lines) + found[2]


def _ran_with(records: list[dict[str, Any]]) -> str:
    """The versions of a run."""
    shown = {
        f" (isomerge {one['isomerge']}, commit {one['commit'][:8]}; Python {one['python']}, torch {one['torch']})"
        for one in records
        if "commit" in one
    }
    return "".join(sorted(shown))


# --- the survey -------------------------------------------------------------------------------------------------------
def _map_of_survey(found: re.Match[str]) -> str:
    survey = json.loads((DOCS / "survey.json").read_text(encoding="utf-8"))
    text = ""
    for table in survey["tables"]:
        rows = [(f"{one['system']} ({one['paper']})", *_of_system(one)) for one in table["rows"]]
        text += f"\n## {table['title']}\n\n{_table('system', 'here', 'note', rows)}"
    text += "\n## What is left out, and why\n\n"
    for reason, words in survey["reasons"].items():
        rows = [one for table in survey["tables"] for one in table["rows"] if one.get("left_out") == reason]
        names = dict.fromkeys(one["system"] for one in rows)
        text += f"- **{', '.join(names)}.** {words}\n"
    links = ", ".join(_link(f"method {name}") for name in survey["newer"])
    return f"{found[1]}{text}\n## Newer than the survey\n\n{links}.\n\n{found[2]}"


def _of_system(one: dict[str, Any]) -> tuple[str, str]:
    if "by" in one:
        return ", ".join(map(_link, one["by"])), one.get("note", "")
    if "planned" in one:
        return "planned", one["planned"]
    return "left out", "[why](#what-is-left-out-and-why)"


def _link(target: str) -> str:
    """A target of survey.json: "method NAME[.OPTION]", "verb NAME [--FLAG[=VALUE]]", "function NAME[.ARGUMENT]",
    "federated aggregate[.ARGUMENT=VALUE]" or "callback NAME"."""
    kind, _, rest = target.partition(" ")
    if kind == "federated":
        return f"[`{rest.partition('.')[2] or rest}`](federated.md#strategies)"
    if kind == "verb":
        shown = f"isomerge {rest}".replace("=", " ")
        return f"[`{shown}`](cli.md#{rest.partition(' ')[0]})"
    name, _, option = rest.partition(".")
    if kind == "method":
        shown = f"{name}: {option}" if option else name
        return f"[`{shown}`](methods.md#{'regmean_1' if name == 'regmean++' else name})"
    return f"[`{rest}`]({'api.md' if kind == 'function' else 'methods.md#averages-over-a-training-run'})"


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
