"""`isomerge.check`: headers, samples and words; then a verdict, its reasons and a recipe."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from isomerge.checking.compare import Compared, compare
from isomerge.checking.fit import dtype_of, header_facts, misfits
from isomerge.checking.models import open_model
from isomerge.checking.pair import VERDICTS, judge_pair
from isomerge.checking.relations import likely_base, stated_base
from isomerge.checking.sentence import sentence
from isomerge.checking.suggest import Advice, advise, command, make_recipe
from isomerge.checking.words import compare_words
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.errors import RequestError

NOTHING: dict[str, Any] = {
    "why": None, "recipe": None, "weights": None, "distance": None, "cosine": None, "sign_conflict": None,
    "norm_ratio": None, "low_rank": None, "alignment_helps": None, "alignment": None, "layers": [], "spaces": [],
    "pairs": [], "from_base": [],
}  # fmt: skip
OF_THE_PAIR = ("cosine", "norm_ratio", "low_rank", "alignment", "layers", "spaces")


def check(*models: Any, base: Any = None, data: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Verdict over two or more models: incompatible, identical, siblings or strangers; reasons and a recipe.

    `base` is their common ancestor, if known; `data` goes into the recipe where it needs some. Reads headers and a
    sample of the weights: seconds, whatever their size.
    """
    if len(models) < 2:
        raise RequestError("Checking: name at least two models to compare, as in check(a, b).")
    start = time.perf_counter()
    threads = torch.get_num_threads()
    # Thousands of short sums: on a busy machine threads that wait for each other would take minutes for seconds.
    torch.set_num_threads(1)
    try:
        found = _Check([open_model(m) for m in models], None if base is None else open_model(base), data)
        return {**found.record(), "seconds": time.perf_counter() - start}
    finally:
        torch.set_num_threads(threads)


class _Check:
    def __init__(self, models: list[Checkpoint], base: Checkpoint | None, data: str | os.PathLike[str] | None) -> None:
        self.models = models
        self.base, self.unfit = _fitting(models, base)
        self.data = None if data is None else os.fspath(data)
        if self.data is not None and not Path(self.data).expanduser().exists():
            raise RequestError(
                f"Checking models: there are no data at {self.data}. Check the path, or leave --data out."
            )
        self.everyone = [*models, *([self.base] if self.base is not None else [])]
        self.words = compare_words(self.everyone)
        self.names = [c.name for c in models]

    def record(self) -> dict[str, Any]:
        problems = misfits(self.everyone)
        facts, notes = header_facts(self.everyone)
        head = {
            "models": self.names,
            "base": None if self.base is None else self.base.name,
            "architecture": {"same": not problems, "model_type": self.models[0].config.get("model_type"), **facts},
            "tokenizer": self.words,
        }
        if problems:
            told = {
                "verdict": "incompatible",
                "reasons": [*problems, *notes],
                "suggestion": "repair what the reasons name, or pick checkpoints of one architecture and size; as they "
                "are, nothing can be aligned or averaged here",
            }
            record = {**NOTHING, **told, **head}
            return {"summary": sentence({**record, "reasons": problems}, []), **record}
        record, obstacles = self._weighed([*self.unfit, *notes])
        record = {**record, **head}
        return {"summary": sentence(record, obstacles), **record}

    def _weighed(self, notes: list[str]) -> tuple[dict[str, Any], list[str]]:
        compared = compare(self.models, self.base)
        pairs = [judge_pair(self.models[i], self.models[j], found) for (i, j), found in compared.pairs.items()]
        from_base: list[dict[str, Any]] = []
        if self.base is not None:
            both = zip(self.models, compared.from_base, strict=True)
            from_base = [judge_pair(model, self.base, found, brief=True) for model, found in both]
        # Of strangers those that alignment brings least near: others may be one model in another order.
        worst = max(pairs, key=lambda pair: (VERDICTS.index(pair["verdict"]), -pair["alignment_helps"] * _gain(pair)))
        reasons = [reason for pair in pairs for reason in self._of(pair, len(pairs) > 1)]
        reasons += self._about_the_base(compared, worst["verdict"], from_base)
        reasons += [*notes, *self.words["differences"], *self.words["notes"]]
        advice = self._advice(worst, from_base)
        recipe, obstacles = self._recipe(advice, compared)
        return {
            "verdict": worst["verdict"],
            "reasons": list(dict.fromkeys([*reasons, *obstacles])),
            "suggestion": self._suggestion(advice, obstacles),
            "why": "; ".join(filter(None, (advice.why, advice.more))) if advice and not obstacles else None,
            "recipe": recipe,
            "weights": {
                "tensors": compared.tensors,
                "parameters": round(compared.values),
                "sampled": compared.sampled,
                "identical_tensors": worst["identical_tensors"],
                "not_finite": {model: len(names) for model, names in compared.bad.items()},
            },
            "distance": max(pair["distance"] for pair in pairs),
            "sign_conflict": max(pair["sign_conflict"] for pair in pairs),
            "alignment_helps": any(pair["alignment_helps"] for pair in pairs),
            **{key: worst[key] for key in OF_THE_PAIR},
            "pairs": pairs if len(pairs) > 1 else [],
            "from_base": from_base,
        }, obstacles

    @staticmethod
    def _of(pair: dict[str, Any], named: bool) -> list[str]:
        who = f"{pair['models'][0]} and {pair['models'][1]}: " if named else ""
        return [f"{who}{reason}" for reason in pair["reasons"]]

    def _about_the_base(self, compared: Compared, verdict: str, from_base: list[dict[str, Any]]) -> list[str]:
        told = []
        for one in from_base:
            name, origin = one["models"]
            if name == origin:
                told.append(f"{name} is the base itself: as one of the models it would add nothing, and it counts once")
                continue
            kin = {"strangers": "does not descend from", "identical": "is the same as", "siblings": "descends from"}
            told.append(f"{name} {kin[one['verdict']]} {origin} (relative distance {one['distance']:.3g})")
            low = one["low_rank"]
            if low is not None:
                told.append(f"what it adds fits an adapter of rank {low['rank']}: see isomerge extract")
        for (i, j), pair in compared.pairs.items() if from_base else ():
            turned, opposed = pair.changes.cosine, pair.changes.changed_conflict
            if turned is not None and opposed is not None:
                told.append(
                    f"what {self.names[i]} and {self.names[j]} learned has cosine {turned:.2g}; of the weights both "
                    f"changed, {100 * opposed:.0f} % went opposite ways"
                )
        if self.base is None and verdict == "siblings":
            place = likely_base(len(self.models), {pair: found.all.apart for pair, found in compared.pairs.items()})
            stated = stated_base(self.models)
            if place is not None:
                told.append(f"{self.names[place]} lies where the base of the others would: try --base with it")
            if stated is not None:
                told.append(f"their model cards name {stated} as their base: --base {stated} allows better methods")
        return told

    def _advice(self, worst: dict[str, Any], from_base: list[dict[str, Any]]) -> Advice | None:
        base = None if self.base is None else self.base.name
        learned = [name for name in self.names if name != base]
        # What one model has learned needs no base to be added to: the two are merged as models.
        with_base = len(learned) > 1 and all(one["verdict"] != "strangers" for one in from_base)
        return advise(
            worst["verdict"],
            learned if with_base else self.names,
            base=base if with_base else None,
            cosine=worst["cosine"],
            conflict=worst["change_conflict"],
            level=worst["alignment"]["level"] or "full",
            data=self.data,
            one_vocabulary=self.words["vocabulary"] is not False,
            gain=_gain(worst),
        )

    def _recipe(self, advice: Advice | None, compared: Compared) -> tuple[str | None, list[str]]:
        if compared.bad:
            return None, _broken(compared)
        if advice is None or any(c.folder is None for c in self.everyone):
            return None, []
        return make_recipe(
            advice, self.models, self.base, words=self.words, dtypes=[dtype_of(c) for c in self.models]
        )  # fmt: skip

    def _suggestion(self, advice: Advice | None, obstacles: list[str]) -> str:
        if obstacles:
            return "repair what the reasons name, then check again"
        if advice is None:
            return "nothing to merge: the models are the same"
        return command(advice, self.names, self.words)


def _fitting(models: list[Checkpoint], base: Checkpoint | None) -> tuple[Checkpoint | None, list[str]]:
    """The base, unless it is none of theirs: then the models are judged without it, and why is said."""
    if base is None or misfits(models) or not (problems := misfits([models[0], base])):
        return base, []
    told = "; ".join(problem.removeprefix(f"{models[0].name} and {base.name}: ").rstrip(".") for problem in problems)
    return None, [f"{base.name} cannot be their base ({told}): leave --base out, or name the model they come from"]


def _gain(pair: dict[str, Any]) -> float:
    return float(pair["alignment"]["gain"].get("full", 0.0))


def _broken(compared: Compared) -> list[str]:
    return [
        f"{model} holds NaN or infinite values in {name_some(names, 3)}: use an intact copy of it"
        for model, names in compared.bad.items()
    ]
