"""What Table 3 times: matching, and of language models the first pair of Table 1, of each base, from --work."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runner import Run

if TYPE_CHECKING:
    from encoding import Inputs
    from language import Job

    from isomerge.checkpoint.memory import MemoryCheckpoint


def match(second: Any, first: Any, options: dict[str, Any], device: str) -> dict[str, Any]:
    """The tensors that matching moves; the others stay, and copying them is no part of it."""
    import isomerge

    return dict(isomerge.align(second, first, device=device, **options).moved().changed())


def examples(scale: str) -> int:
    """How many training examples of its own set each model is measured by: as many as at the original scale."""
    from language import PLANS

    return PLANS["reduced" if scale == "reduced" else "original"].grams


class LanguagePair:
    """Two models of one base, and the training examples that each of them is measured by."""

    merges: tuple[str, ...] = ("Simple", "Fisher", "RegMean")

    def __init__(self, jobs: list[Job], count: int) -> None:
        self.jobs, self.plan, self.count = jobs, jobs[0].plan, count
        self.pairs = [(0, 1)]

    def training_seconds(self) -> list[float | None]:
        records = [job.folder / "training.json" for job in self.jobs]
        return [json.loads(record.read_text()).get("seconds") if record.exists() else None for record in records]

    @cached_property
    def _models(self) -> list[MemoryCheckpoint]:
        from language import state_of

        from isomerge.checkpoint.memory import MemoryCheckpoint

        folders = [job.folder for job in self.jobs]
        configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
        return [MemoryCheckpoint(f.name, state_of(f), config) for f, config in zip(folders, configs, strict=True)]

    @cached_property
    def _inputs(self) -> Inputs:
        from encoding import Inputs

        job = self.jobs[0]
        found = Inputs(job.base, job.data, self.plan.examples, self.plan.tested, self.plan.length)
        for each in self.jobs:
            found.rows(each.corpus, "train")  # encoded before the clock runs
        return found

    def matching(self, pair: tuple[int, int], options: dict[str, Any], device: str) -> Callable[[], Any]:
        first, second = (self._models[place] for place in pair)
        return lambda: match(second, first, options, device)

    def merging(self, pair: tuple[int, int], method: str, device: str) -> Callable[[], Any]:
        import isomerge

        models = [self._models[place] for place in pair]
        if method == "Simple":
            return lambda: isomerge.merge_state_dicts([{n: m.read(n) for n in m.tensors} for m in models])
        data = [self._inputs.passes(self.jobs[place].corpus, self.count) for place in pair]
        options = {"method": method.lower(), "calibrate": {"fisher": "empirical"} if method == "Fisher" else None}
        return lambda: isomerge.merge(models, data=data, device=device, **options).state_dict()


def language_pairs(run: Run) -> dict[str, LanguagePair]:
    """By base. Those whose models Table 1 has not trained yet are left out, and that is said."""
    try:
        from language import Job, base_path, bases_of, plan_for, title
        from table1 import SUITES
    except ImportError as error:
        run.note(f"Language models are left out: {error}.")
        return {}
    plans = {title(base): plan_for(run.scale, base) for base in bases_of(run)}
    run.settings["texts"] = f"{examples(run.scale)} of each set, the long ones first, by models of {plans!r}"
    found, missing = {}, []
    for base in bases_of(run):
        try:
            where = base_path(base, run.models)
        except SystemExit:
            missing.append(title(base))
            continue
        plan, sets = plans[title(base)], SUITES[run.scale][0].inside[:2]
        jobs = [Job(where, corpus, 0, plan, run.data, run.work, run.device) for corpus in sets]
        if run.finished or all(job.done for job in jobs):
            found[title(base)] = LanguagePair(jobs, examples(run.scale))
        else:
            missing.append(title(base))
    if missing:
        run.note(f"{' and '.join(missing)}: left out, as --work holds no models of table1.py; run it first.")
    return found
