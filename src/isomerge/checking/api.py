"""`isomerge.check`: headers, samples and tokenizers; then a verdict, its reasons and a recipe."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from isomerge.arguments import require_shared_types, require_types
from isomerge.checking.advice import Advice, advise, command, incompatible, make_recipe, reconstruction, sentence
from isomerge.checking.comparison import Comparisons, compare
from isomerge.checking.headers import (
    dtype_of,
    header_facts,
    likely_base,
    misfits,
    open_model,
    outputs_of,
    stated_base,
)
from isomerge.checking.mergeability import SAFE, MeasuredMerges, Mergeability, expected_loss, told
from isomerge.checking.other_shapes import by_features, joins_features, why_by_features
from isomerge.checking.pair import AlignmentGain, LowRankDifference, PairCheck, judge_pair
from isomerge.checking.tokenizers import TokenizerComparison, compare_tokenizers
from isomerge.checking.trial import LONGER, SMALL, Candidate, Trial
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress, name_some
from isomerge.data.open import open_data
from isomerge.errors import IsomergeError, RequestError
from isomerge.kinship import IDENTICAL, ONE_BASE, SIBLINGS, STRANGERS, VERDICTS
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result

INCOMPATIBLE = "incompatible"


@dataclass
class ComparedWeights(Result):
    """How much there is, and how much of it was read."""

    tensors: int
    parameters: int
    sampled: int
    identical_tensors: int
    not_finite: dict[str, int]
    """How many tensors of each model hold NaN or infinite values."""


@dataclass
class CheckResult(Result):
    """What `check` found. Of several pairs the worst one gives the verdict and the numbers."""

    summary: str
    """The verdict in one sentence."""
    verdict: str
    """"incompatible", "identical", "siblings" or "strangers"."""
    reasons: list[str]
    suggestion: str
    """The command to try."""
    why: str | None = None
    """Why this suggestion, and what else would help."""
    recipe: str | None = None
    """The same as a recipe in YAML; None where there is nothing to merge or something is in the way."""
    weights: ComparedWeights | None = None
    distance: float | None = None
    """The largest of all pairs, as `isomerge.kinship` defines it."""
    sign_conflict: float | None = None
    alignment_helps: bool | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    low_rank: LowRankDifference | None = None
    alignment: AlignmentGain | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    spaces: list[dict[str, Any]] = field(default_factory=list)
    mergeability: Mergeability | None = None
    """What a merge would lose: a range, or with data what was measured. None where nothing can be merged."""
    pairs: list[PairCheck] = field(default_factory=list)
    """Every pair, where there are several."""
    from_base: list[PairCheck] = field(default_factory=list)
    """Every model against the base."""
    models: list[str] = field(default_factory=list)
    base: str | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerComparison = field(default_factory=TokenizerComparison)
    seconds: float = 0.0


@shows_progress
def check(*models: Any, base: Any = None, data: Any = None, progress: Shown = None) -> CheckResult:
    """Compare two or more models: are they incompatible, identical, siblings or strangers, and how to merge them?

    Models, one after the other or in a list, are whatever `isomerge.open_checkpoint` takes. `base` is their common
    ancestor, if known. Reads headers and a sample of the weights: seconds, whatever their size. With `data`, a path or
    a list with one for each model, merges are also made in memory and measured on held-out examples, without labels, in
    about a minute.

    >>> isomerge.check("model-a", "model-b").verdict
    'strangers'
    """
    progress = callback(progress)
    if len(models) == 1 and isinstance(models[0], (list, tuple)):
        models = tuple(models[0])
    if len(models) < 2:
        raise RequestError("Checking: name at least two models to compare, as in check(a, b).")
    require_types(data=(data, str, os.PathLike, Mapping, Sequence, Callable, None))
    require_shared_types(progress=progress)
    sources = list(data) if isinstance(data, (list, tuple)) else [] if data is None else [data]
    _require_data(sources, len(models))
    start = time.perf_counter()
    opened, origin = [open_model(m) for m in models], None if base is None else open_model(base)
    threads = torch.get_num_threads()
    # Thousands of short sums: on a busy machine threads that wait for each other would take minutes for seconds.
    torch.set_num_threads(1)
    try:
        weighed = _check(opened, origin, sources)
        if not _is_small(opened):
            torch.set_num_threads(threads)
        result = weighed if isinstance(weighed, CheckResult) else weighed.result(progress)
    finally:
        torch.set_num_threads(threads)
    result.seconds = time.perf_counter() - start
    return result


def _is_small(models: Sequence[Checkpoint]) -> bool:
    return sum(math.prod(info.shape) for info in models[0].tensors.values()) < SMALL


def _require_data(sources: Sequence[Any], models: int) -> None:
    for source in sources:
        path = source.get("path") if isinstance(source, Mapping) else source
        if isinstance(path, (str, os.PathLike)) and not Path(path).expanduser().exists():
            raise RequestError(
                f"Checking models: there is nothing at {os.fspath(path)}. Check the path, or leave data out.",
                keys=("data",),
            )
    if len(sources) not in (0, 1, models):
        raise RequestError(
            f"Checking models: there are {len(sources)} data sets for {models} models. Give one for all, or one for "
            "each, in their order.",
            keys=("data",),
        )


def _check(models: list[Checkpoint], base: Checkpoint | None, data: list[Any]) -> CheckResult | _Weighed:
    base, notes = _fitting(models, base)
    everyone = [*models, *([base] if base is not None else [])]
    names = [c.name for c in models]
    problems = misfits(everyone)
    facts, differences = header_facts(everyone)
    head: dict[str, Any] = {
        "models": names,
        "base": None if base is None else base.name,
        "architecture": {"same": not problems, "model_type": models[0].config.get("model_type"), **facts},
        "tokenizer": compare_tokenizers(everyone),
    }
    if problems and joins_features(models):
        paths = _paths(data)
        return CheckResult(
            summary=incompatible(names, problems, "averaged or aligned"),
            verdict=INCOMPATIBLE,
            reasons=[*problems, *differences],
            suggestion=by_features(names, paths),
            why=why_by_features(names[0], bool(paths)),
            **head,
        )
    if problems:
        return CheckResult(
            summary=incompatible(names, problems),
            verdict=INCOMPATIBLE,
            reasons=[*problems, *differences],
            suggestion="repair what the reasons name, or pick checkpoints of one architecture and size; as they are, "
            "nothing can be aligned or averaged here",
            **head,
        )
    return _Weighed(models, base, data, [*notes, *differences], head)


class _Weighed:
    """Models that fit together, compared by their weights."""

    def __init__(
        self,
        models: list[Checkpoint],
        base: Checkpoint | None,
        data: list[Any],
        notes: Sequence[str],
        head: dict[str, Any],
    ) -> None:
        self.models, self.base, self.data, self.notes, self.head = models, base, data, notes, head
        self.tokens: TokenizerComparison = head["tokenizer"]
        self.names = [c.name for c in models]
        self.compared: Comparisons = compare(models, base)
        self.pairs = [judge_pair(models[i], models[j], own) for (i, j), own in self.compared.pairs.items()]
        self.from_base: list[PairCheck] = []
        if base is not None:
            both = zip(models, self.compared.from_base, strict=True)
            self.from_base = [judge_pair(model, base, own) for model, own in both]
        # Of strangers those that alignment brings least near: others may be one model in another order.
        self.worst = max(self.pairs, key=lambda pair: (VERDICTS.index(pair.verdict), -pair.alignment_helps * pair.gain))

    def result(self, progress: Progress | None) -> CheckResult:
        compared, worst = self.compared, self.worst
        many = len(self.pairs) > 1
        reasons = [
            f"{pair.models[0]} and {pair.models[1]}: {reason}" if many else reason
            for pair in self.pairs
            for reason in pair.reasons
        ]
        reasons += [*self._about_the_base(), *self.notes, *self.tokens.differences, *self.tokens.notes]
        mergeability, advice = self._mergeability(progress)
        if mergeability is not None:
            reasons += [mergeability.says, *(mergeability.measured.notes if mergeability.measured else ())]
        recipe, obstacles, planned = self._recipe(advice)
        expected = mergeability.expected if mergeability else None
        summary = sentence(
            self.names, worst.verdict, cosine=worst.cosine, gain=worst.gain,
            one_vocabulary=self.tokens.vocabulary is not False, obstacles=obstacles,
            safe=expected is None or expected.safe,
        )  # fmt: skip
        return CheckResult(
            summary=summary,
            verdict=worst.verdict,
            reasons=list(dict.fromkeys([*reasons, *planned, *obstacles])),
            suggestion=self._suggestion(advice, obstacles),
            why="; ".join(filter(None, (advice.why, advice.more))) if advice and not obstacles else None,
            recipe=recipe,
            weights=ComparedWeights(
                tensors=compared.tensors,
                parameters=round(compared.values),
                sampled=compared.sampled,
                identical_tensors=worst.identical_tensors,
                not_finite={model: len(names) for model, names in compared.not_finite.items()},
            ),
            distance=max((pair.distance for pair in self.pairs if pair.distance is not None), default=None),
            sign_conflict=max(pair.sign_conflict for pair in self.pairs),
            alignment_helps=any(pair.alignment_helps for pair in self.pairs),
            cosine=worst.cosine,
            norm_ratio=worst.norm_ratio,
            low_rank=worst.low_rank,
            alignment=worst.alignment,
            layers=worst.layers,
            spaces=worst.spaces,
            mergeability=mergeability,
            pairs=self.pairs if many else [],
            from_base=self.from_base,
            **self.head,
        )

    def _about_the_base(self) -> list[str]:
        said = []
        for one in self.from_base:
            name, origin = one.models
            if name == origin:
                said.append(f"{name} is the base itself: as one of the models it would add nothing, and it counts once")
                continue
            kin = {STRANGERS: "does not descend from", IDENTICAL: "is the same as", SIBLINGS: "descends from"}
            far = "" if one.distance is None else f" (relative distance {one.distance:.3g})"
            said.append(f"{name} {kin[one.verdict]} {origin}{far}")
            if one.low_rank is not None:
                said.append(f"what it adds fits an adapter of rank {one.low_rank.rank}: see isomerge extract")
        for pair in self.pairs if self.from_base else ():
            if pair.change_cosine is not None and pair.change_conflict is not None:
                said.append(
                    f"what {pair.models[0]} and {pair.models[1]} learned has cosine {pair.change_cosine:.2g}; of the "
                    f"weights both changed, {100 * pair.change_conflict:.0f} % went opposite ways"
                )
        if self.base is None and self.worst.verdict == SIBLINGS:
            place = likely_base(len(self.models), {pair: own.all.apart for pair, own in self.compared.pairs.items()})
            stated = stated_base(self.models)
            if place is not None:
                said.append(f"{self.names[place]} lies where the base of the others would: try it as `base`")
            if stated is not None:
                said.append(f"their model cards name {stated} as their base: as `base` it allows better methods")
        return said

    def _mergeability(self, progress: Progress | None) -> tuple[Mergeability | None, Advice | None]:
        """What a merge would lose, and what to try: where merges were measured, the best of them."""
        advice = self._advice(_paths(self.data))
        if self.worst.verdict == IDENTICAL or self.compared.not_finite:
            return None, advice
        distance = max((pair.distance for pair in self.pairs if pair.distance is not None), default=None)
        expected = expected_loss(distance, math.log(outputs_of(self.models[0].config)))
        measured, notes = None, []
        if self.data:
            try:
                measured, advice = self._measured(advice, progress)
            except IsomergeError as error:
                notes = [f"; nothing was measured on data: {error}"]
        return Mergeability(told(expected, measured) + "".join(notes), expected, measured), advice

    def _measured(self, advice: Advice | None, progress: Progress | None) -> tuple[MeasuredMerges, Advice | None]:
        if self.tokens.vocabulary is False:
            raise RequestError("their tokens differ, so that losses could not be compared")
        if not Trial.fits(self.models):
            raise RequestError("the models are too large for that; merge them, and measure by isomerge eval")
        trial = Trial(self.models, self.base, [open_data(source) for source in self.data], progress)
        candidates = self._candidates()
        measured = trial.run(candidates)
        best = next((one.advice for one in candidates if one.name == measured.best), None)
        if best is None or (best.method == "reconstruct" and not best.data) or self._hopeless(measured):
            return measured, advice
        if best.method == "reconstruct":
            best = candidates[-1].advice  # with the time to choose what it leans to
        return measured, replace(best, why=told(None, measured), more=None)

    def _hopeless(self, measured: MeasuredMerges) -> bool:
        """Whether the best merge loses much, and there was no time for any that solves layers on data."""
        best = measured.named(measured.best)
        tried = any(one.method == "reconstruct" for one in measured.merges)
        return best is not None and not tried and best.lost > SAFE * math.log(outputs_of(self.models[0].config))

    def _candidates(self) -> list[Candidate]:
        """The mean, what the weights alone suggest, and the features of the models; from the quickest."""
        mean = Candidate("mean", Advice("linear", "", options={"weight": 1.0}))
        by_weights = self._advice([])
        named = {"linear": "aligned mean", "task_arithmetic": "task arithmetic", "ties": "TIES"}
        others = []
        if by_weights is not None and (by_weights.method, bool(by_weights.align)) != ("linear", False):
            others = [Candidate(named.get(by_weights.method, by_weights.method), by_weights)]
        if self.worst.verdict == SIBLINGS and (self.worst.cosine or 0.0) >= ONE_BASE:  # of mean features, none leans
            return [mean, *others, Candidate("reconstruct", reconstruction(_paths(self.data), "", features="mean"))]
        joint = {"features": "joint"} if self.worst.verdict == STRANGERS else {}
        quick = reconstruction(_paths(self.data), "", **joint, lean="no")
        whole = reconstruction(_paths(self.data), "", **joint)
        return [
            mean, *others, Candidate("reconstruct, not leaning", quick), Candidate("reconstruct", whole, LONGER)
        ]  # fmt: skip

    def _advice(self, data: Sequence[str]) -> Advice | None:
        base = None if self.base is None else self.base.name
        learned = [name for name in self.names if name != base]
        # What one model has learned needs no base to be added to: the two are merged as models.
        with_base = len(learned) > 1 and all(one.verdict != STRANGERS for one in self.from_base)
        return advise(
            self.worst.verdict,
            learned if with_base else self.names,
            base=base if with_base else None,
            cosine=self.worst.cosine,
            conflict=self.worst.change_conflict,
            level=self.worst.alignment.level or "full",
            data=data,
            one_vocabulary=self.tokens.vocabulary is not False,
            by_features=self.tokens.vocabulary is not False or joins_features(self.models),
            gain=self.worst.gain,
        )

    def _recipe(self, advice: Advice | None) -> tuple[str | None, list[str], list[str]]:
        """The recipe, what is in the way of a merge, and notes on what the merge does."""
        broken = [
            f"{model} holds NaN or infinite values in {name_some(names, 3)}: use an intact copy of it"
            for model, names in self.compared.not_finite.items()
        ]
        in_memory = any(c.in_memory for c in (*self.models, self.base) if c is not None)
        if broken or advice is None or in_memory:
            return None, broken, []
        dtypes = [dtype_of(c) for c in self.models]
        return make_recipe(advice, self.models, self.base, tokens=self.tokens, dtypes=dtypes)

    def _suggestion(self, advice: Advice | None, obstacles: list[str]) -> str:
        if obstacles:
            return "repair what the reasons name, then check again"
        if advice is None:
            return "nothing to merge: the models are the same"
        return command(advice, self.names, self.tokens)


def _paths(data: Sequence[Any]) -> list[str]:
    """Of the data, for a recipe; data in memory has none."""
    paths = [source.get("path") if isinstance(source, Mapping) else source for source in data]
    return [os.fspath(path) for path in paths if isinstance(path, (str, os.PathLike))]


def _fitting(models: list[Checkpoint], base: Checkpoint | None) -> tuple[Checkpoint | None, list[str]]:
    """The base, unless it does not fit them: then the models are judged without it, and a note says why."""
    if base is None or misfits(models) or not (problems := misfits([models[0], base], named=False)):
        return base, []
    why = "; ".join(problem.rstrip(".") for problem in problems)
    return None, [f"{base.name} cannot be their base ({why}): leave `base` out, or name the model they come from"]
