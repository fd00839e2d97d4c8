"""How a verb shows its result, and its progress on stderr while it works."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from isomerge.choices import PROGRESS
from isomerge.cli.short_paths import shortened
from isomerge.progress_bars import progress_bar
from isomerge.results import Result, plain
from isomerge.text import all_visible, as_flags, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = dict[str, Any]
# A pipe has no width: output that a program reads is never folded or cut.
PIPE_WIDTH = 1_000_000
NOTES = ("notes", "reasons")
_started = time.perf_counter()


def start_clock() -> None:
    """The command was given now."""
    global _started
    _started = time.perf_counter()


class Progress(Protocol):
    """Called now and then during long work: how much of the total is done, and the current stage."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


@dataclass(frozen=True)
class Voice:
    """The flags of every verb. Shows one JSON object, or nothing, or a table with a progress bar on stderr."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Add the traceback to an error.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model, if it needs it.")
    ] = False

    @property
    def is_silent(self) -> bool:
        return self.json or self.quiet

    @contextlib.contextmanager
    def work(self, unit: str = "bytes", bar: Callable[[str], Any] = progress_bar) -> Iterator[Progress | None]:
        """Show progress on stderr, by a bar on a terminal and by lines elsewhere, and keep what libraries print away
        from stdout."""
        shown: Any = contextlib.nullcontext()
        if os.environ.get(PROGRESS) == "json":
            shown = contextlib.nullcontext(progress_records())
        elif not self.is_silent:
            shown = bar(unit) if sys.stderr.isatty() else contextlib.nullcontext(ProgressLines())
        with contextlib.redirect_stdout(sys.stderr), self._trust(), shown as progress:
            yield progress

    def _trust(self) -> contextlib.AbstractContextManager[None]:
        if not self.trust_remote_code:
            return contextlib.nullcontext()
        from isomerge.checkpoint.remote_code import trust_remote_code

        return trust_remote_code()

    def show(
        self, result: Result | Mapping[str, Any], table: Callable[[Record], RenderableType], *, timed: bool = True
    ) -> None:
        """Print the result: as JSON, as a table, or not at all. If `timed`, the table has the time since the command
        was given, with all that came before and after the work itself."""
        record = as_record(result)
        if self.json:
            print(json.dumps(plain(record, strict=True), allow_nan=False))
        elif not self.quiet:
            shown = {**record, **{key: [as_flags(text) for text in record[key]] for key in NOTES if key in record}}
            if timed and shown.get("seconds") is not None:
                shown["seconds"] = time.perf_counter() - _started
            folder = None
            if sys.stdout.isatty():  # a program wants whole paths
                shown, folder = shortened(shown)
            page = table(all_visible(shown))
            _print(page if folder is None else below(page, f"… is {visible(folder)}"))


def as_record(result: Result | Mapping[str, Any]) -> Record:
    """A result as the dictionary that `--json` prints."""
    return result.to_dict() if isinstance(result, Result) else dict(result)


def _print(shown: RenderableType) -> None:
    """Fold cells to the width of a terminal; in a pipe, print each row on one line."""
    from rich.console import Console

    if sys.stdout.isatty():
        _fold(shown)
        Console(highlight=False, markup=False, emoji=False).print(shown, crop=False)
        return
    console = Console(width=PIPE_WIDTH, highlight=False, markup=False, emoji=False)
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
    from isomerge.reporting.terminal import duration

    return [*(f"note: {note}" for note in record["notes"]), duration(record["seconds"])]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


class ProgressLines:
    """Progress for a log: one line a minute, none for what takes less."""

    every = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._began = self._last = clock()
        self._before = 0

    def __call__(self, done: int, total: int, what: str) -> None:
        now = self._clock()
        if what != self._stage:  # each stage has its own speed
            self._stage, self._began, self._before = what, now, done
        if now - self._last >= self.every:
            self._last = now
            print(f"isomerge: {visible(what, keep='')}: {self._state(done, total, now)}", file=sys.stderr, flush=True)

    def _state(self, done: int, total: int, now: float) -> str:
        from isomerge.reporting.terminal import duration, size

        amount = f"{size(done)} of {size(total)}" if total >= 10**6 else f"{done} of {total}"
        if done <= self._before:
            return amount
        left = (total - done) * (now - self._began) / (done - self._before)
        return f"{amount}, about {duration(left)} left"


LINES_EVERY = 0.2
"""Seconds between two lines of one stage."""


def progress_records() -> Progress:
    """For a program that watches: one JSON object per line on stderr, a few times a second."""
    last: tuple[str | None, float] = (None, 0.0)

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if what != last[0] or done >= total or now - last[1] >= LINES_EVERY:
            last = (what, now)
            print(json.dumps({"done": done, "total": total, "what": what}), file=sys.stderr, flush=True)

    return update
