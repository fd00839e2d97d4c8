"""How a verb shows its result, and its progress on stderr while it works."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from isomerge.results import Result, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = dict[str, Any]
# A pipe has no width: output that a program reads is never folded or cut.
PIPE_WIDTH = 1_000_000
NOTES = ("notes", "reasons")


class Progress(Protocol):
    """Called now and then during long work: how much of the total is done, and the current stage."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


@dataclass(frozen=True)
class Voice:
    """The flags of every verb. Shows one JSON object, or nothing, or a table with a progress bar on stderr."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Add the traceback to an error.")] = False

    @property
    def is_silent(self) -> bool:
        return self.json or self.quiet

    @contextlib.contextmanager
    def work(self, unit: str = "bytes", bar: Callable[[str], Any] | None = None) -> Iterator[Progress | None]:
        """Show a progress bar if stderr is a terminal, and keep what libraries print away from stdout."""
        watched = not self.is_silent and sys.stderr.isatty()
        shown = (bar or progress_bar)(unit) if watched else contextlib.nullcontext()
        with contextlib.redirect_stdout(sys.stderr), shown as progress:
            yield progress

    def show(self, result: Result | Mapping[str, Any], table: Callable[[Record], RenderableType]) -> None:
        """Print the result: as JSON, as a table, or not at all."""
        record = as_record(result)
        if self.json:
            print(json.dumps(plain(record, strict=True), allow_nan=False))
        elif not self.quiet:
            notes = {key: [as_flags(text) for text in record[key]] for key in NOTES if key in record}
            _print(table({**record, **notes}))


def as_record(result: Result | Mapping[str, Any]) -> Record:
    """A result as the dictionary that `--json` prints."""
    return result.to_dict() if isinstance(result, Result) else dict(result)


def as_flags(note: str) -> str:
    """The notes of the library name arguments, in backticks: on the command line they are flags.

    >>> as_flags("write it with `anchor_out`")
    'write it with --anchor-out'
    """
    return re.sub("`([a-z_]+)`", lambda name: "--" + name[1].replace("_", "-"), note)


def _print(shown: RenderableType) -> None:
    """Fold cells to the width of a terminal; in a pipe, print each row on one line."""
    from rich.console import Console

    if sys.stdout.isatty():
        _fold(shown)
        Console(highlight=False).print(shown, crop=False)
        return
    console = Console(width=PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    # Rich pads cells to the width of their column.
    print("\n".join(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))


def _fold(shown: RenderableType) -> None:
    """Continue a long word on the next line of its cell, where rich would cut it off."""
    from rich.console import Group
    from rich.table import Table

    for part in shown.renderables if isinstance(shown, Group) else [shown]:
        if isinstance(part, Group):
            _fold(part)
        elif isinstance(part, Table):
            for column in part.columns:
                column.overflow = "fold"


def listing(*columns: str, numbers: bool = False, header: bool = True) -> Any:
    """An empty table without borders; with `numbers`, every column but the first is right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=header)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and position else "left")
    return table


def below(table: Any, *lines: str) -> RenderableType:
    """A table with lines of text under it."""
    from rich.console import Group
    from rich.text import Text

    return Group(table, *(Text(line) for line in lines))


def ending(record: Record) -> list[str]:
    """The last lines of most tables: notes, and the time taken."""
    return [*(f"note: {note}" for note in record["notes"]), f"{record['seconds']:.1f} s"]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@contextlib.contextmanager
def progress_bar(unit: str = "bytes") -> Iterator[Progress]:
    """A bar for one stage at a time. `unit` is "bytes", "steps", or "both" if stages differ; a count of a million or
    more is then taken for bytes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    bytes_, steps = DownloadColumn(), MofNCompleteColumn()

    class BytesOrSteps(ProgressColumn):
        def render(self, task: Task) -> Text:
            return (bytes_ if (task.total or 0) >= 10**6 else steps).render(task)

    amount = {"bytes": bytes_, "steps": steps, "both": BytesOrSteps()}[unit]
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None, visible=False)  # until the first stage begins
        stage: str | None = None

        def update(done: int, total: int, what: str) -> None:
            nonlocal stage
            if what != stage:
                # Each stage has its own speed: without a reset the time left would mix the two.
                stage = what
                shown.reset(task, total=total, completed=done, description=what, visible=True)
            shown.update(task, completed=done, total=total)

        yield update
