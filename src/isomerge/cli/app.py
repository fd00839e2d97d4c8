"""The `isomerge` application: its verbs, and the one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from isomerge.cli import errors, interruption
from isomerge.cli.align import align
from isomerge.cli.barrier import barrier
from isomerge.cli.calibrate import calibrate
from isomerge.cli.check import check
from isomerge.cli.demo import demo
from isomerge.cli.ensemble import ensemble
from isomerge.cli.eval import eval_
from isomerge.cli.extract import extract
from isomerge.cli.list import list_
from isomerge.cli.merge import merge
from isomerge.cli.plan import plan
from isomerge.cli.report import report
from isomerge.cli.reproduce import reproduce
from isomerge.cli.selftest import selftest
from isomerge.cli.sweep import sweep
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
        try:
            errors.require_text(given)
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

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n  {self.epilog}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Let the parser collect surplus words, to refuse them here with a next step.
        allowed, ctx.allow_extra_args = ctx.allow_extra_args, True
        rest = super().parse_args(ctx, args)
        if ctx.args and not allowed and not ctx.resilient_parsing:
            raise RequestError(errors.too_many_words(self, ctx))
        return rest


def _version(wanted: bool) -> None:
    if wanted:
        from isomerge import __version__

        typer.echo(f"isomerge {__version__}")
        raise typer.Exit


# Plain help: in boxes the two dozen flags of align leave a column of three words for what they mean.
app = typer.Typer(cls=Verbs, rich_markup_mode=None)


@app.callback(epilog="Example: isomerge align model-b model-a -o model-b-aligned")
def isomerge(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Align and merge transformer checkpoints, exactly."""


VERBS = (
    align, check, selftest, list_, merge, plan, verify, extract, reproduce, eval_, ensemble, sweep, calibrate, report,
    barrier, demo,
)  # fmt: skip
for _verb in VERBS:
    app.command(
        _verb.__name__.rstrip("_"),
        cls=Verb,
        short_help=DECLARED[_verb].summary,
        epilog=f"Example: {DECLARED[_verb].example}",
        context_settings=DECLARED[_verb].settings,
    )(_verb)
