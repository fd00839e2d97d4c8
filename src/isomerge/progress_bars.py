"""Progress that somebody sees: a bar on a terminal or in a notebook, and nothing where a program reads the output."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast

from isomerge.text import visible

P = ParamSpec("P")
T = TypeVar("T")
Report = Callable[[int, int, str], None]
Shown = Report | bool | None
"""What `progress` may be: a function, True for a bar, False for none; None is a bar in notebooks and none elsewhere."""

_inside: ContextVar[bool] = ContextVar("a public function is at work", default=False)


def shows_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Resolve `progress` of a public function, and take the bar away when it is done. What it calls shows no bar of its
    own."""

    @functools.wraps(function)
    def watched(*args: P.args, **options: P.kwargs) -> T:
        given = options.get("progress")
        bar = None
        if given is True or (given is None and not _inside.get() and in_notebook()):
            bar = Bar() if in_notebook() or sys.stderr.isatty() else None
        if given is None or isinstance(given, bool):
            options["progress"] = bar
        token = _inside.set(True)
        try:
            return function(*args, **options)
        finally:
            _inside.reset(token)
            if bar is not None:
                bar.stop()

    return watched


def callback(progress: Shown) -> Report | None:
    """What `shows_progress` has left of it."""
    return cast("Report | None", progress)


def stops_bar(method: Callable[P, T]) -> Callable[P, T]:
    """A method that reports to the `progress` of its object, which the function that made it may have left."""

    @functools.wraps(method)
    def watched(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        finally:
            if isinstance(bar := getattr(args[0], "progress", None), Bar):
                bar.stop()

    return watched


def in_notebook() -> bool:
    """Whether output goes to the page of a kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return hasattr(shell, "kernel")


class Bar:
    """Is there from the first report on until it is stopped, and again if more is reported."""

    def __init__(self) -> None:
        self._shown: ExitStack | None = None
        self._update: Report | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._update is None:
            self._shown = ExitStack()
            self._update = self._shown.enter_context(progress_bar("both"))
        self._update(done, total, what)

    def stop(self) -> None:
        if self._shown is not None:
            self._shown.close()
        self._shown = self._update = None


@contextmanager
def progress_bar(unit: str = "bytes") -> Iterator[Report]:
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
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None, visible=False)  # until the first stage begins
        stage: str | None = None

        def update(done: int, total: int, what: str) -> None:
            nonlocal stage
            if what != stage:
                # Each stage has its own speed: without a reset the time left would mix the two.
                stage = what
                shown.reset(task, total=total, completed=done, description=visible(what, keep=""), visible=True)
            shown.update(task, completed=done, total=total)

        yield update
