"""`isomerge best A B … --data PATH`: which way of merging these models is best, and is it better than one of them?"""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.flags import Data, MergeMemory, Reading, Running, Task, Threads, data_source, option
from isomerge.cli.interruption import announce_output
from isomerge.cli.output import Voice
from isomerge.cli.search import (
    Algorithm,
    By,
    ForceFolder,
    SearchOut,
    Test,
    TestSplit,
    Workers,
    require_data,
    search_table,
)
from isomerge.cli.sweep import announced, interruptible
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


@verb(
    "Find the best way to merge models, or say which to keep.",
    "isomerge best model-a model-b --base base --data images.tar.xz --evaluations 16 -o found",
)
def best(
    models: Annotated[list[str], typer.Argument(metavar="A B …", help="Two or more models.")],
    *,
    base: Annotated[str | None, option("MODEL", "Their common ancestor, for task arithmetic and TIES.")] = None,
    data: Data = None,
    task: Task = None,
    evaluations: Annotated[int, option("N", "How many merges to measure.")] = 60,
    algorithm: Algorithm = "bayesian",
    by: By = None,
    test: Test = None,
    test_split: TestSplit = None,
    workers: Workers = None,
    out: SearchOut = None,
    reading: Reading,
    running: Running,
    threads: Threads = None,
    max_memory: MergeMemory = None,
    force: ForceFolder = False,
    voice: Voice,
) -> None:
    """Find the best way to merge models, and compare it with the models alone.

    From what check says follow the ways to try: task arithmetic and TIES where a base is known, the mean, slerp, and
    for strangers alignment and reconstruct. Each is measured, the numbers of the best are searched, and the result is
    tested once on data that nothing was chosen on.
    """
    if recipe := next((one for one in models if one.endswith((".yml", ".yaml"))), None):
        raise RequestError(
            f"best chooses the recipe itself, and {recipe} is one. Search its numbers: isomerge search {recipe} --data "
            "PATH; or name the models."
        )
    if len(models) < 2:
        raise RequestError(
            "best compares ways to merge: name at least two models, as in isomerge best model-a model-b."
        )
    require_data(data, test, test_split)
    if out is not None:
        announce_output(out)

    import isomerge

    line = f"{evaluations} evaluations at most"
    with voice.work("both") as progress, interruptible(out):
        found = isomerge.best(
            *models, base=base, data=data_source(data, reading, running), task=task, evaluations=evaluations,
            algorithm=algorithm, by=by, test=test and {"path": str(test), "split": test_split},
            batch_size=running.batch_size, seed=running.seed, device=running.device, workers=workers,
            threads=threads, max_memory=max_memory, out=out, force=force,
            progress=progress if voice.is_silent else announced(line, progress),
        )  # fmt: skip
    voice.show(found.record, search_table)
