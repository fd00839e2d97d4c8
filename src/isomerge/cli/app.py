"""The `isomerge` application: its verbs, and the one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from isomerge.choices import MethodOption, method_options, methods
from isomerge.cli import errors, interruption
from isomerge.cli.align import align
from isomerge.cli.barrier import barrier
from isomerge.cli.best import best
from isomerge.cli.calibrate import calibrate
from isomerge.cli.check import check
from isomerge.cli.convert import convert
from isomerge.cli.curve import curve
from isomerge.cli.demo import demo
from isomerge.cli.describe import describe
from isomerge.cli.distill import distill
from isomerge.cli.ensemble import ensemble
from isomerge.cli.eval import eval_
from isomerge.cli.extract import extract
from isomerge.cli.find import find
from isomerge.cli.flags import one_of
from isomerge.cli.list import list_
from isomerge.cli.merge import merge
from isomerge.cli.mergekit import (
    ELSEWHERE,
    mergekit_extract_lora,
    mergekit_moe,
    mergekit_multi,
    mergekit_tokensurgeon,
    mergekit_yaml,
)
from isomerge.cli.moe import moe
from isomerge.cli.output import start_clock
from isomerge.cli.plan import plan
from isomerge.cli.push import push
from isomerge.cli.rebase import rebase
from isomerge.cli.report import report
from isomerge.cli.reproduce import reproduce
from isomerge.cli.search import search
from isomerge.cli.selftest import selftest
from isomerge.cli.studio import studio
from isomerge.cli.sweep import sweep
from isomerge.cli.transplant import transplant
from isomerge.cli.verb import DECLARED
from isomerge.cli.verify import verify
from isomerge.errors import RequestError


class Verbs(TyperGroup):
    """A group of commands whose failures are one paragraph on stderr and, with `--json`, one object on stdout."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        interruption.forget_outputs()
        start_clock()
        try:
            errors.require_text(given)
            if given[0] in ELSEWHERE:
                raise RequestError(f"There is no {given[0]} in isomerge. {ELSEWHERE[given[0]]}.")
            # Not standalone, so that usage errors arrive here as exceptions and are reported like all others.
            result = super().main(given, prog_name or "isomerge", complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            # The flags are looked up in the raw arguments: a wrong option is met before any flag is parsed.
            verb = self.commands.get(given[0])
            result = errors.report_error(error, as_json="--json" in given, debug="--debug" in given, verb=verb)
        code = result if isinstance(result, int) else 0
        if code == errors.INTERRUPTED:
            errors.report_interruption(shlex.join(["isomerge", *given]), as_json="--json" in given)
        if standalone_mode:
            sys.exit(code)
        return code


class Verb(TyperCommand):
    """A command whose example stays on one line, to be copied."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")  # old versions of typer escape it for rich

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        words = ctx.meta.get("words", [])
        method = next((value for word, value in zip(words, [*words[1:], ""], strict=True) if word == "--method"), None)
        if method and self.context_settings.get("ignore_unknown_options"):
            with formatter.section(f"Options of {one_of('--method', method, methods())}"):
                formatter.write_dl([(_flag(option), option.meaning) for option in method_options(method)])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n  {self.epilog}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = [part for word in args for part in word.split("=", 1)]
        # Let the parser collect surplus words, to refuse them here with a next step.
        allowed, ctx.allow_extra_args = ctx.allow_extra_args, True
        rest = super().parse_args(ctx, args)
        if ctx.args and not allowed and not ctx.resilient_parsing:
            raise RequestError(errors.too_many_words(self, ctx))
        return rest


def _flag(option: MethodOption) -> str:
    name = option.name.replace("_", "-")
    return f"--{name} / --no-{name}" if option.kind == "boolean" else f"--{name} {option.kind.upper()}"


def _version(wanted: bool) -> None:
    if wanted:
        from isomerge import __version__

        typer.echo(f"isomerge {__version__}")
        raise typer.Exit


# Plain help: in boxes the two dozen flags of align leave a column of three words for what they mean.
app = typer.Typer(cls=Verbs, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(epilog="Example: isomerge align model-b model-a -o model-b-aligned")
def isomerge(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Align and merge transformer checkpoints, exactly.

    Command lines of mergekit work too: isomerge mergekit-yaml, mergekit-multi, mergekit-moe,
    mergekit-tokensurgeon, mergekit-extract-lora.
    """


MERGEKIT = (mergekit_yaml, mergekit_multi, mergekit_moe, mergekit_tokensurgeon, mergekit_extract_lora)
VERBS = (
    align, check, selftest, list_, merge, plan, verify, extract, reproduce, eval_, ensemble, sweep, search,
    best, distill, calibrate, report, barrier, curve, demo, studio, push, rebase, moe, transplant, convert,
    describe, find, *MERGEKIT,
)  # fmt: skip
for _verb in VERBS:
    app.command(
        _verb.__name__.rstrip("_").replace("_", "-"),
        cls=Verb,
        short_help=DECLARED[_verb].summary,
        hidden=_verb in MERGEKIT,
        epilog=f"Example: {DECLARED[_verb].example}",
        context_settings=DECLARED[_verb].settings,
    )(_verb)


def complete_alone(verb: str) -> None:
    """Answer a shell that completes the line of a verb which is also a program, and end; else nothing."""
    if f"_{verb.replace('-', '_').upper()}_COMPLETE" in os.environ:
        command: Any = typer.main.get_command(app)
        command.commands[verb].main(prog_name=verb)
