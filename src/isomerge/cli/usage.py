"""A command line that cannot be read: the parser's own words, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

from isomerge.errors import did_you_mean

TOGETHER = "Measure each for itself, or the models together: isomerge ensemble {words} --data PATH."


def wrong_usage(error: Exception, verb: Any = None) -> str:
    """What the parser says, a next step where it has none, and where to read on.

    `verb` is the command that was named: some of the parser's errors do not know it.
    """
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    verb = verb or (context.command if context else None)
    option = getattr(error, "option_name", "")
    if getattr(error, "possibilities", None):
        message = f"No such option: {option}. {did_you_mean(option, error.possibilities)}"  # type: ignore[attr-defined]
    if message and message[-1] not in ".?!)":
        message += "."
    if verb is not None and option:
        message += _how_to_write(verb, option, message)
    elif verb is not None and (extra := re.search(r"unexpected extra arguments? ?(?:\(s\) )?\((.+)\)$", message)):
        message = _too_many(verb, context, extra[1])
    elif verb is not None and message.startswith("Missing option '-o'") and (word := _meant_out(context)):
        message = f"No such option: {word}. The folder to write is named with -o/--out."
    elif verb is not None and verb.epilog and message.startswith("Missing"):
        message += f" {verb.epilog}."
    path = (
        context.command_path if context else f"isomerge {verb.name}" if verb is not None and verb.name else "isomerge"
    )
    return f"{message} See: {path} --help."


def _meant_out(context: Any) -> str | None:
    """What was written for -o, where a verb takes the options of methods and so any word that begins with dashes."""
    words = (context.params.get("models") or []) if context else []
    return next((word for word in words if word.partition("=")[0] in ("--output", "--out-dir", "--output-dir")), None)


def _how_to_write(verb: Any, option: str, message: str) -> str:
    """A switch that was given a value, or an option that was given none."""
    found = next((one for one in verb.params if option in (*one.opts, *one.secondary_opts)), None)
    if found is None:
        return ""
    if "does not take a value" in message:
        on, off = found.opts[0], next(iter(found.secondary_opts), None)
        return (
            f" It is a switch: write {on}, or {off} to turn it off." if off else f" It is a switch: write {on} alone."
        )
    if "requires an argument" in message:
        return f" Write {option} {found.metavar or found.name.upper()}."
    return ""


def _too_many(verb: Any, context: Any, extra: str) -> str:
    """More words than the verb takes."""
    taken = [one for one in verb.params if not one.opts[0].startswith("-")]
    wanted = " ".join(one.metavar or one.name.upper() for one in taken) or "no arguments"
    message = f"{verb.name} takes {'one ' if len(taken) == 1 else ''}{wanted}, and '{extra}' is more than that."
    if verb.name == "eval":
        return f"{message} {TOGETHER.format(words=' '.join([context.params.get('model') or 'A', extra]))}"
    return f"{message} Run it once for each." if len(taken) == 1 else message
