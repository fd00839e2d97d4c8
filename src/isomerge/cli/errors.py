"""From an exception to one paragraph, an exit code and, with `--json`, one object."""

from __future__ import annotations

import errno
import json
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from isomerge.cli.interruption import what_is_left
from isomerge.errors import IsomergeError, RequestError, did_you_mean, ran_out_of_memory
from isomerge.packages import not_imported, why_not_imported
from isomerge.text import visible, without_secrets

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
NUMBERS = {
    r"Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
    r"Input should be greater than or equal to (\d+)": r"it must be at least \1",
    r"'[^']*' is not a valid integer( range)?": "it must be a whole number",
    r"\S+ is not in the range x>=(\d+)": r"it must be at least \1",
}
"""How the parser says what a number has to be (the last two: older versions of typer), and how a person does."""


def report_error(error: Exception, *, as_json: bool, debug: bool, verb: Any = None) -> int:
    """Print an error to stderr (with `--json` also to stdout), and return the exit code. `verb` is the command."""
    message, code = _describe(error, verb)
    if debug:
        trace = without_secrets("".join(traceback.format_exception(error)))
        print(visible(trace), end="", file=sys.stderr)
    _print(message, type(error).__name__, code, as_json)
    return code


def require_text(words: Sequence[str]) -> None:
    """Refuse names whose bytes are no text: neither a lock file nor the libraries that load models can hold them."""
    for word in words:
        if not word.isascii() and any(0xD800 <= ord(one) <= 0xDFFF for one in word):
            raise RequestError(
                f"The argument {word} has bytes that are no text in {sys.getfilesystemencoding()}. Rename the file, or "
                "choose a locale with UTF-8, such as LC_ALL=C.UTF-8."
            )


def report_interruption(command: str, *, as_json: bool) -> None:
    """Say that the work was interrupted, what is left of it on disk, and which command continues."""
    message = f"Interrupted; the inputs were not changed. {what_is_left(command)}"
    _print(message, "KeyboardInterrupt", INTERRUPTED, as_json)


def _print(message: str, kind: str, code: int, as_json: bool) -> None:
    message = without_secrets(message)  # whatever was given as an argument, or came from a library
    print(f"isomerge: {visible(message, keep='')}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message, "kind": kind, "exit_code": code}))


def _describe(error: Exception, verb: Any) -> tuple[str, int]:
    if isinstance(error, IsomergeError):
        return " ".join(f"{error}{_as_flags(error.keys, verb)}".split()), error.exit_code
    # New versions of typer carry their own copy of click and old ones import it, so a usage error is recognised by
    # what it can do and not by its class.
    if hasattr(error, "format_message"):
        return _wrong_usage(error, verb), int(getattr(error, "exit_code", WRONG_REQUEST))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" while writing {error.filename}" if error.filename else ""
        return (
            f"The disk is full{place}. No folder that looks finished was left behind and the inputs were not changed; "
            "free some space, or name another disk with -o, and run the same command again.",
            FAILED,
        )
    if isinstance(error, (ImportError, OSError)) and (package := not_imported(error)):
        return f"This cannot be done: {why_not_imported(package, error)}.", FAILED
    if isinstance(error, OSError):
        return f"A file could not be used: {error}. Check the path and its permissions.", FAILED
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a device
        return "The memory of the GPU ran out. Take --device cpu, or close other programs that use it.", FAILED
    if ran_out_of_memory(error):
        return "Memory ran out. Set --max-memory (for example 8GB), or close other programs.", FAILED
    return (
        f"Unexpected {type(error).__name__}: {error}. This is a defect of isomerge: "
        "run again with --debug and report the traceback.",
        FAILED,
    )


def _as_flags(keys: Sequence[str], verb: Any) -> str:
    """The library names arguments: this says which flags of the verb they are."""
    options = {one.name: one for one in getattr(verb, "params", ()) if one.opts[0].startswith("-")}
    named = [options[key] for key in keys if key in options]
    flags = [one.opts[0] if one.is_flag else f"{one.opts[0]} {one.metavar or one.name.upper()}" for one in named]
    return f" On the command line: {', '.join(flags)}." if flags else ""


# --- command lines that cannot be parsed ------------------------------------------------------------------------------
def _wrong_usage(error: Any, verb: Any) -> str:
    """The parser's message, a next step where it has none, and where to read on.

    `verb` is the command that was named: some of the parser's errors do not know it.
    """
    context = getattr(error, "ctx", None)
    verb = verb or (context.command if context else None)
    option = getattr(error, "option_name", "")
    message = " ".join(error.format_message().split())
    for theirs, ours in NUMBERS.items():
        message = re.sub(theirs, ours, message)
    possible = getattr(error, "possibilities", None)
    if possible and option:
        message = f"No such option: {option}. {did_you_mean(option, possible)}"
    elif possible:  # of click itself from 8.4 on, which adds them to what typer has said
        message = f"No such command '{error.command_name}'. {did_you_mean(error.command_name, possible)}"
    elif message and message[-1] not in ".?!)":
        message += "."
    if verb is not None and option:
        message += _how_to_write(verb, option)
    elif verb is not None and type(error).__name__ == "MissingParameter":
        message += f" {verb.epilog}." if verb.epilog else ""
    return f"{message} {see_help(verb, context)}"


def see_help(verb: Any, context: Any = None) -> str:
    path = (
        context.command_path if context else f"isomerge {verb.name}" if verb is not None and verb.name else "isomerge"
    )
    return f"See: {path} --help."


def _how_to_write(verb: Any, option: str) -> str:
    """How to write an option that was given wrongly: a switch takes no value, and any other option needs one."""
    parameter = next((one for one in verb.params if option in (*one.opts, *one.secondary_opts)), None)
    if parameter is None:
        return ""
    if not getattr(parameter, "is_flag", False):
        return f" Write {option} {parameter.metavar or parameter.name.upper()}."
    on, off = parameter.opts[0], next(iter(parameter.secondary_opts), None)
    return f" It is a switch: write {on}, or {off} to turn it off." if off else f" It is a switch: write {on} alone."


def too_many_words(verb: Any, context: Any) -> str:
    """More arguments than the verb takes."""
    extra = " ".join(context.args)
    taken = [one for one in verb.params if not one.opts[0].startswith("-")]
    wanted = " ".join(one.metavar or one.name.upper() for one in taken) or "no arguments"
    message = f"{verb.name} takes {'one ' if len(taken) == 1 else ''}{wanted}, and '{extra}' is more than that."
    if verb.name == "eval":
        models = f"{context.params.get('model') or 'A'} {extra}"
        message += f" Measure each separately, or together: isomerge ensemble {models} --data PATH."
    elif len(taken) == 1:
        message += " Run it once for each."
    return f"{message} {see_help(verb, context)}"
