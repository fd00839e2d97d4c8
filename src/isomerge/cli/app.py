"""The `isomerge` application: the verbs, and the one place where an exception becomes words and an exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"isomerge {version('isomerge')}")
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


_VERBS: list[tuple[Callable[..., None], str]] = [
    (align, "isomerge align model-b model-a -o model-b-aligned --level full"),
    (check, "isomerge check model-a model-b"),
    (selftest, "isomerge selftest model-a --seed 1"),
    (list_, "isomerge list architectures"),
    (merge, "isomerge merge model-a model-b --method ties --base base --density 0.5 -o merged"),
    (plan, "isomerge plan recipe.yml --explain model.layers.0.mlp.up_proj.weight"),
    (verify, "isomerge verify merged"),
    (extract, "isomerge extract base finetuned --rank 16 -o adapter"),
    (reproduce, "isomerge reproduce merged"),
    (eval_, "isomerge eval model-a --data images.tar.xz --split test"),
    (ensemble, "isomerge ensemble model-a model-b --data images.tar.xz --split test"),
    (sweep, "isomerge sweep recipe.yml --over t=0:1:0.1 --data images.tar.xz --split validation -o swept"),
    (calibrate, "isomerge calibrate model-a --data images.tar.xz --limit 2000 -o statistics.safetensors"),
    (report, "isomerge report merged --barrier curve.json --open"),
    (barrier, "isomerge barrier model-a model-b --data images.tar.xz --align --plot curve.svg"),
    (demo, "isomerge demo -o demo-out --seeds 5"),
]
for _verb, _example in _VERBS:
    _settings = ANY_OPTION if _verb in (merge, plan, sweep) else {}
    app.command(_verb.__name__.rstrip("_"), epilog=f"Example: {_example}", context_settings=_settings)(_verb)
