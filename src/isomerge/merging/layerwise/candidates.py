"""The models that a reconstruction may give: merges that lean to one parent or to none, and each parent by itself.

Each is fitted to the same data with the same goals, so that they can be compared on examples none of them has seen. A
parent whose output map is fitted costs next to nothing, and polished it is plain distillation: a merge has to beat it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isomerge.merging.layerwise.assembly import FeatureAssembly
from isomerge.merging.layerwise.goals import GoalData, text_above
from isomerge.merging.layerwise.gradient_steps import POLISH_RATES, BlockRefinement, PredictionLoss, polish, put_back
from isomerge.merging.layerwise.joint import find_assembly
from isomerge.merging.layerwise.kept_stages import KeptStages, owners_of
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.output_fit import finite, fit_output, output_stage
from isomerge.merging.layerwise.solver import LayerReport, LayerSolver, LayerTargets
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.kept_steps import KeptSteps

LEANS = (0.8, 0.95)
"""Shares of the stream that one parent may get. The second is tried for the parent that the first was best with."""

TRIAL = 50
"""Steps of polishing that a lean is tried with."""


@dataclass
class Candidates:
    """Puts one after the other into the merged model of `run`."""

    run: LayerwiseMerge
    joint: bool
    ridge: float | None
    floor: float
    refine: int
    fits_output: bool
    """Fit the output map to predictions, after it was solved for scores."""

    def merge(self, shares: Sequence[float], data: GoalData, *, keep: bool = True) -> dict[str, Any]:
        """The parents' features, stage by stage; what there is to report of it. `keep`: store finished stages for a run
        that is made again."""
        run = self.run
        assembly = run.assembly(shares, run.roles.stored)
        record: dict[str, Any] = {}
        if self.joint:
            kept = KeptStages(run, [data.examples], keep=keep)
            known = kept.restore_features(assembly)
            assembly = known or find_assembly(
                lambda: run.runners()[1:], run.plan.stages, data.examples, assembly,
                lambda done, total: run.inputs.report(done, total, "choosing features"),
            )  # fmt: skip
            if known is None:
                kept.store_features(assembly)
            record["features"] = assembly.summary()
        run.start_from(assembly)
        return record | self.solve(assembly, run.plan.stages, data, self.refine, keep)

    def parent(self, number: int, data: GoalData, *, keep: bool = True) -> dict[str, Any]:
        """One parent as it is, but for an output map that is fitted to predictions."""
        run = self.run
        run.start_from(run.parent_alone(number))
        stage = output_stage(run.merged, run.plan.stages, data.examples) if self.fits_output else None
        assembly = run.assembly(run.shares, run.roles.stored)
        return self.solve(assembly, [stage] if stage else [], data, 0, keep)

    def polish(self, steps: int, rate: float, data: GoalData, *, keep: bool = True) -> dict[str, Any]:
        """Gradient steps on the whole of the model in place; `rate` is the first one's, relative to a tensor's size."""
        kept = KeptStages(self.run, [data.examples], keep=keep)
        known = kept.restore("polished")
        if known is not None:
            return dict(known["note"])
        done = polish(
            self._loss(data), steps, rate, lambda step: self.run.inputs.report(step, steps, "polishing"),
            KeptSteps(self.run.inputs.kept if keep else None, "polishing"),
        )  # fmt: skip
        kept.store("polished", [""], done)
        return done

    def loss(self, data: GoalData) -> float:
        """What candidates are compared by: how far the model in place is from its parents' predictions and, where these
        are of text, the mean of that and of its loss of the text above theirs. Predictions have less noise, but where
        parents are wrong alike only the text says so."""
        distance = self._loss(data).mean()
        shares, parents = self.run.shares, self.run.others
        losses = []
        for number, batch in enumerate(data.examples):
            own = shares if data.beliefs is None else data.beliefs.batches[number]
            losses.append(text_above(self.run.merged, parents, own, batch))
        known = [one for one in losses if one is not None]
        return (distance + sum(known) / len(known)) / 2 if known else distance

    def weights(self) -> list[Tensor]:
        """Of the model in place, for `restore`."""
        return [p.detach().cpu().clone() for p in self.run.merged.parameters()]

    def restore(self, weights: Sequence[Tensor]) -> None:
        put_back(list(self.run.merged.parameters()), weights)

    def tried(self, name: str, fit: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What trying a candidate says of it. No more than that is kept for a run that is made again."""
        kept = self.run.inputs.kept
        known = kept.load(f"tried-{name}") if kept is not None else None
        if known is None:
            known = {}, fit()
            if kept is not None:
                kept.store(f"tried-{name}", *known)
        return dict(known[1])

    def best_lean(self, data: GoalData, held_out: GoalData, polish: int) -> tuple[list[float], list[dict[str, Any]]]:
        """The shares whose merge predicts best, and all that were tried. What will be polished is compared after some
        steps of that: gradients gain less where both parents have much of the stream."""
        count = len(self.run.shares)
        tried: list[dict[str, Any]] = []

        def measure(shares: list[float]) -> float:
            def fit() -> dict[str, Any]:
                self.merge(shares, data, keep=False)
                if polish:
                    self.polish(min(polish, TRIAL), POLISH_RATES[-1], data, keep=False)
                return {"weights": shares, "held_out": self.loss(held_out)}

            tried.append(self.tried(f"lean-{len(tried)}", fit))
            return float(tried[-1]["held_out"])

        even = measure([1 / count] * count)
        first, second = LEANS
        losses = [measure(leaning(anchor, first, count)) for anchor in range(count)]
        best = min(range(count), key=lambda anchor: finite(losses[anchor]))
        if losses[best] < even:
            measure(leaning(best, second, count))
        return min(tried, key=lambda one: finite(one["held_out"]))["weights"], tried

    def _loss(self, data: GoalData) -> PredictionLoss:
        merged, *parents = self.run.runners()
        return PredictionLoss(merged, parents, self.run.shares, data)

    def solve(
        self, assembly: FeatureAssembly, stages: Sequence[Stage], data: GoalData, refine: int, keep: bool
    ) -> dict[str, Any]:
        """Solve these stages in turn, from the model in place; what there is to report of it."""
        run = self.run
        run.report = LayerReport(run.roles)
        merged, *parents = run.runners()
        targets = LayerTargets(parents, assembly, stages, run.roles, run.budget // 4, data)
        solver = LayerSolver(merged, targets, self.ridge, self.floor, run.report)
        refinement = BlockRefinement(merged, parents, assembly, run.roles, run.plan, refine, run.budget)
        last = {stage.place: stage for stage in stages}
        refined, kept = [], KeptStages(run, [data.examples], keep=keep)
        for number, stage in enumerate(stages):
            known = kept.restore(f"stage-{number}")
            done = known["note"] if known else None
            if known is None:
                solver.solve(stage, data.examples)
                if refine and last[stage.place] is stage:
                    done = refinement.refine(stage.place, data)
                owners = [*owners_of(stage), *([str(refinement.block(stage.place))] if done else [])]
                kept.store(f"stage-{number}", owners, done)
            if done:
                refined.append(done)
            run.inputs.report(number + 1, len(stages), "reconstructing")
        record: dict[str, Any] = {"refined": refined} if refine else {}
        output = output_stage(run.merged, stages, data.examples) if self.fits_output else None
        if output is not None:
            known = kept.restore("output")
            record["output"] = (
                known["note"] if known else fit_output(merged, parents, output, data, run.shares, run.budget)
            )
            if known is None:
                kept.store("output", owners_of(output), record["output"])
        return record


def leaning(anchor: int, share: float, count: int) -> list[float]:
    """Shares of `count` parents, of which one has `share`.

    >>> leaning(1, 0.8, 3)
    [0.1, 0.8, 0.1]
    """
    return [share if m == anchor else round((1 - share) / (count - 1), 12) for m in range(count)]
