"""The progress bar on stderr: what is being done, how far it is, the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """What long work calls now and then: how much of the total is done, and a word on what it is."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


@contextlib.contextmanager
def bar(unit: str = "bytes") -> Iterator[Progress]:
    """A bar that shows one stage at a time; `unit` is "bytes", "steps", or "both": of stages, some count the one and
    some the other, and nothing counts a million steps."""
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

    class Either(ProgressColumn):
        def render(self, task: Task) -> Text:
            return (bytes_ if (task.total or 0) >= 10**6 else steps).render(task)

    amount = {"bytes": bytes_, "steps": steps, "both": Either()}[unit]
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None, visible=False)  # until there is something to tell
        stage: str | None = None

        def update(done: int, total: int, what: str) -> None:
            nonlocal stage
            if what != stage:
                # A new stage has its own speed: without a reset the time left would mix the two.
                stage = what
                shown.reset(task, total=total, completed=done, description=what, visible=True)
            shown.update(task, completed=done, total=total)

        yield update
