"""What every verb shares: flags, checks of enumerated values and of the output folder, and how results are shown."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.completion import offer
from isomerge.cli.errors import announce_output
from isomerge.errors import RequestError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from isomerge.cli.progress import Progress

LEVELS = ("permutation", "rotation", "full")
DTYPES = ("bfloat16", "float16", "float32", "float64")
# A pipe has no width: nothing that is read by a program is folded or cut.
PIPE = 1_000_000


def one_of(option: str, given: str, known: Iterable[str]) -> str:
    """`given` if it is known; otherwise an error that names the nearest known value.

    >>> one_of("--level", "full", LEVELS)
    'full'
    """
    known = list(known)
    if given not in known:
        raise RequestError(f"{option} cannot be '{given}'. {did_you_mean(given, known)}")
    return given


def choice(option: str, known: Iterable[str]) -> Callable[[str | None], str | None]:
    """A callback for an enumerated option. Not click's Choice, which only lists the values."""

    def check(given: str | None) -> str | None:
        return None if given is None else one_of(option, given, known)

    return check


def readable(option: str, reader: str) -> Callable[[typer.Context, str | None], str | None]:
    """A callback that refuses, before any work, what a reader of isomerge.checkpoint cannot understand."""

    def check(context: typer.Context, given: str | None) -> str | None:
        # While a shell completes a line nothing is refused, and the reader would make it wait for torch.
        if given is not None and not context.resilient_parsing:
            from isomerge import checkpoint

            try:
                getattr(checkpoint, reader)(given)
            except RequestError as error:
                raise RequestError(f"{option} cannot be '{given}'. {error}") from None
        return given

    return check


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Add the traceback to an error.")]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The folder to write.")]
Level = Annotated[
    str,
    typer.Option(
        metavar="|".join(LEVELS),
        autocompletion=offer(LEVELS),
        callback=choice("--level", LEVELS),
        help="What may move: units and heads; FFN units and head rotations, as in the paper; every exact symmetry.",
    ),
]
ShardSize = Annotated[
    str,
    typer.Option(metavar="SIZE", callback=readable("--shard-size", "parse_size"), help="The largest file to write."),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        autocompletion=offer(DTYPES),
        callback=readable("--out-dtype", "parse_dtype"),
        help="The dtype to write; the source's if not named.",
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="How many units or tensors are worked on at once; all cores if not named.")
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=readable("--max-memory", "parse_size"),
        help="Keep at most half of this between sweeps, and skip the output check above it.",
    ),
]
Seed = Annotated[int, typer.Option(help="Names the random numbers.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already in OUT.")]


def reserve_output(out: Path, models: Sequence[str], *, force: bool) -> None:
    """Refuse, before any work, an output folder that is an input or that would be overwritten unasked."""
    from isomerge.checkpoint import refuse_overwrite
    from isomerge.checkpoint.staging import Staging

    refuse_overwrite(out, models)
    Staging(out, force=force)  # refuses an occupied folder, and touches nothing until it is entered
    announce_output(out)


@dataclass(frozen=True)
class Voice:
    """How a verb speaks: one JSON object, silence, or a table with a progress bar on stderr."""

    json: bool
    quiet: bool

    @contextlib.contextmanager
    def work(self, unit: str = "bytes") -> Iterator[Progress | None]:
        """Run the work with a progress bar where somebody watches, and keep stdout free of other people's prints."""
        from isomerge.cli.progress import bar

        watched = not (self.json or self.quiet) and sys.stderr.isatty()
        with contextlib.redirect_stdout(sys.stderr), bar(unit) if watched else contextlib.nullcontext() as progress:
            yield progress

    def show(self, record: dict[str, Any], table: Callable[[dict[str, Any]], RenderableType]) -> None:
        """Print the record: as JSON, as the table made from it, or not at all."""
        if self.json:
            from isomerge.reporting.record import plain

            print(json.dumps(plain(record), allow_nan=False))
        elif not self.quiet:
            _print(table(record))


def _print(shown: RenderableType) -> None:
    """On a terminal as wide as that, except for what is to be copied; in a pipe one line for each row, whole."""
    from rich.console import Console

    if sys.stdout.isatty():
        _fold(shown)
        Console(highlight=False).print(shown, crop=False)
        return
    console = Console(width=PIPE, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    # Rich fills cells up to the width of their column.
    print("\n".join(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))


def _fold(shown: RenderableType) -> None:
    """Let a long word go on in the next line of its cell, where rich would cut it off."""
    from rich.console import Group
    from rich.table import Table

    for part in shown.renderables if isinstance(shown, Group) else [shown]:
        if isinstance(part, Group):
            _fold(part)
        elif isinstance(part, Table):
            for column in part.columns:
                column.overflow = "fold"


def written_record(written: Any) -> dict[str, Any]:
    """What was written, as the record's last keys."""
    return {key: getattr(written, key) for key in ("out", "files", "tensors", "bytes", "sha256")}
