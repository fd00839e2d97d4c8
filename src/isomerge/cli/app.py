"""The `isomerge` application: the verbs, and the one place where an exception becomes words and an exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from isomerge.cli import errors
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
from isomerge.cli.request import ANY_OPTION
from isomerge.cli.selftest import selftest
from isomerge.cli.sweep import sweep
from isomerge.cli.verify import verify


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
        errors.forget_outputs()
        try:
            # Not standalone, so that wrong options arrive here as exceptions and are told like every other error.
            result = super().main(given, prog_name or "isomerge", complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            # The flags are looked up in the raw arguments: a wrong option is found before any flag is parsed.
            verb = self.commands.get(given[0])
            result = errors.tell(error, as_json="--json" in given, debug="--debug" in given, verb=verb)
        code = result if isinstance(result, int) else 0
        if code == errors.INTERRUPTED:
            errors.tell_interruption(shlex.join(["isomerge", *given]), as_json="--json" in given)
        if standalone_mode:
            sys.exit(code)
        return code


class Verb(TyperCommand):
    """A command whose example stays on one line, to be copied."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n  {self.epilog}\n")


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


# Each with its line in `isomerge --help`, whole at 80 columns, and an example.
_VERBS: list[tuple[Callable[..., None], str, str]] = [
    (
        align,
        "Write SOURCE moved as close to ANCHOR as its symmetries allow.",
        "isomerge align model-b model-a -o model-b-aligned --level full",
    ),
    (check, "Say whether models fit together, and how to merge them.", "isomerge check model-a model-b"),
    (selftest, "Show that the symmetries of MODEL are exact.", "isomerge selftest model-a --seed 1"),
    (list_, "List methods, architectures or solvers, one line each.", "isomerge list architectures"),
    (
        merge,
        "Merge models into one, as a recipe or flags say.",
        "isomerge merge model-a model-b --method ties --base base --density 0.5 -o merged",
    ),
    (
        plan,
        "Say what a merge would do: tensors, bytes, memory, time.",
        "isomerge plan recipe.yml --explain model.layers.0.mlp.up_proj.weight",
    ),
    (verify, "Check that OUT is whole, loads, and is what its lock says.", "isomerge verify merged"),
    (
        extract,
        "Write what FINETUNED adds to BASE as a low-rank adapter.",
        "isomerge extract base finetuned --rank 16 -o adapter",
    ),
    (reproduce, "Make OUT again from its lock file, and compare hashes.", "isomerge reproduce merged"),
    (
        eval_,
        "Measure MODEL on data: accuracy, F1, perplexity and others.",
        "isomerge eval model-a --data images.tar.xz --split test",
    ),
    (
        ensemble,
        "Measure the mean of the models' probabilities on data.",
        "isomerge ensemble model-a model-b --data images.tar.xz --split test",
    ),
    (
        sweep,
        "Measure a merge at many values, without writing a model.",
        "isomerge sweep recipe.yml --over t=0:1:0.1 --data images.tar.xz --split validation -o swept",
    ),
    (
        calibrate,
        "Write the sums over data that merging and alignment use.",
        "isomerge calibrate model-a --data images.tar.xz --limit 2000 -o statistics.safetensors",
    ),
    (
        report,
        "Write one HTML page that shows what was done to OUT.",
        "isomerge report merged --barrier curve.json --open",
    ),
    (
        barrier,
        "Measure the models on the line between A and B.",
        "isomerge barrier model-a model-b --data images.tar.xz --align --plot curve.svg",
    ),
    (demo, "Train tiny models, merge them in every way, show the results.", "isomerge demo -o demo-out --seeds 5"),
]
for _verb, _summary, _example in _VERBS:
    app.command(
        _verb.__name__.rstrip("_"),
        cls=Verb,
        short_help=_summary,
        epilog=f"Example: {_example}",
        context_settings=ANY_OPTION if _verb in (merge, plan, sweep) else {},
    )(_verb)
