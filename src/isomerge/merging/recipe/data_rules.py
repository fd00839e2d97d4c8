"""A recipe against its data: who needs some, who uses it, and what does not go together with it.

Works on data as it was written, like options.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isomerge.merging.data_methods import DataMethod
from isomerge.merging.methods import METHODS, Method
from isomerge.merging.methods.method import MEASURED
from isomerge.merging.recipe.entries import parameter_blocks, walk
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Path, Places, Problems

UNMEASURED = {
    "fisher": "weighs by importances: it needs 'data' to measure them on, or files under 'importance'",
    "gram": "needs Gram matrices of what the models read: 'data' to measure them on, or files under 'statistics'",
}
ONE_TABLE = "the models have to read the same tokens there: leave 'tokenizer' out"


def names_files(recipe: Any) -> bool:
    """Whether the method's statistics come from files that options name."""
    return any(block.get(option) is not None for _, block, _ in parameter_blocks(recipe) for option in MEASURED)


def check_data(method: Method | DataMethod, data: Mapping[str, Any], places: Places, problems: Problems) -> None:
    """Enter what does not fit."""
    rules = _Rules(method, data, names_files(data), places, problems)
    if isinstance(method, DataMethod):
        rules.whole_models(method)
    rules.needed()
    rules.calibrate()
    rules.repair()
    rules.align()
    for path, text in rules.unused():
        rules.add(path, text)


def unused_keys(method: Method | DataMethod, data: Mapping[str, Any]) -> list[Path]:
    """What is about data and without effect: a sweep leaves it out at the points that do not use it."""
    return [path for path, _ in _Rules(method, data, names_files(data), Places(), Problems("")).unused()]


@dataclass
class _Rules:
    method: Method | DataMethod
    data: Mapping[str, Any]
    files: bool
    places: Places
    problems: Problems

    @property
    def measured(self) -> str | None:
        """What is measured of each model on data."""
        return self.method.measures if isinstance(self.method, Method) and not self.files else None

    @property
    def whole(self) -> str | None:
        """How a whole-model method takes data."""
        return self.method.data if isinstance(self.method, DataMethod) else None

    @property
    def entries(self) -> list[tuple[Path, Mapping[str, Any]]]:
        return [(entry.path, entry.content) for entry in walk(self.data) if entry.kind == "model"]

    @property
    def each(self) -> bool:
        """Every model has data of its own."""
        return bool(self.entries) and all(entry.get("data") is not None for _, entry in self.entries)

    @property
    def looks(self) -> bool:
        """Whether an alignment was asked to look at data, in so many words."""
        align = self.data.get("align")
        settings = align if isinstance(align, dict) else {}
        evidence = settings.get("evidence")
        words = list(evidence.values()) if isinstance(evidence, dict) else [evidence]
        return bool(settings.get("learn")) or any(word in ("activations", "mix") for word in words)

    def has(self, key: str) -> bool:
        return self.data.get(key) not in (None, False)

    def add(self, path: Path, text: str, missing: str | None = None) -> None:
        self.problems.add(self.places, path, text, missing)

    def lack_data(self, path: Path, text: str) -> None:
        self.add(path, text, missing="data")

    # --- rules --------------------------------------------------------------------------------------------------------
    def whole_models(self, method: DataMethod) -> None:
        name = method.name
        for key in ("slices", "modules"):
            if self.has(key):
                self.add((key,), f"{name} runs whole models, all layers of each: use 'models' instead of '{key}'")
        base = self.data.get("base_model") or None
        if base is not None and method.base == "ignored":
            self.add(("base_model",), f"{name} has no base: leave it out, or list it among the models")
        elif base is not None and not (method.any_architecture or method.parts):
            for path, entry in self.entries:
                if ModelReference.read(entry.get("model")) == ModelReference.read(base):
                    self.add(path, f"{base} is the base, which {name} does not merge: leave it out of 'models'")
        if self.has("tokenizer"):
            what = "takes tokens from its models" if method.parts else "runs the models on data"
            self.add(("tokenizer", "source"), f"{name} {what}, and {ONE_TABLE}")
        for key in ("align", "repair") if method.parts else ():
            if self.has(key):
                self.add((key,), f"{name} takes parts of the models as they are: leave '{key}' out")
        for key in ("align", "repair") if method.any_architecture else ():
            if self.has(key):
                why = "looks at predictions, which have no basis and no units"
                if method.base == "required":
                    why = "brings the models together in a way of its own"
                self.add((key,), f"{name} {why}: leave '{key}' out")
        align = self.data.get("align")
        anchor = align.get("anchor") if isinstance(align, dict) else None
        first = self.entries[0][1].get("model") if self.entries else anchor
        first, step = (base, "leave 'anchor' out") if base else (first, f"put {anchor} first in 'models'")
        if anchor is not None and (ModelReference.read(anchor) or anchor) != (ModelReference.read(first) or first):
            to = "base" if base else "first"
            self.add(("align", "anchor"), f"{name} aligns the models to the {to}: {step}")

    def needed(self) -> None:
        name = self.method.name
        lacking = [path for path, entry in self.entries if entry.get("data") is None]
        if self.whole in ("each", "task"):
            for path in lacking:
                self.lack_data(path, f"{name} looks at each model's own data: this model needs 'data'")
        if self.whole == "task" and not self.has("data"):
            text = f"{name} compares the data of the models with that of the task: the recipe needs 'data', too"
            self.lack_data(("merge_method",), text)
        elif self.whole == "together" and lacking and not self.has("data"):
            self.lack_data(("merge_method",), f"{name} runs the models on data, without labels: it needs 'data'")
        elif isinstance(self.method, DataMethod) and self.whole == "one" and not self.has("data"):
            does = "scores models on data with labels" if self.method.labels else "runs the models on data"
            self.lack_data(("merge_method",), f"{name} {does}: it needs 'data'")
        elif self.measured and not self.has("data") and (lacking or not self.entries):
            self.lack_data(("merge_method",), f"{name} {UNMEASURED[self.measured]}")
        if self.measured and self.has("tokenizer"):
            self.add(("tokenizer", "source"), f"{name} runs the models on data, and {ONE_TABLE}")

    def calibrate(self) -> None:
        given = self.data.get("calibrate")
        if given is None or self.measured is None:
            return
        foreign = {"fisher": ("only",), "gram": ("fisher", "samples")}[self.measured]
        for key in [key for key in foreign if isinstance(given, dict) and given.get(key) is not None]:
            other = "Gram matrices" if self.measured == "fisher" else "Fisher information"
            self.add(("calibrate", key), f"'{key}' is of {other}, which {self.method.name} does not use")

    def repair(self) -> None:
        if not self.has("repair"):
            return
        if not self.has("data") and not self.each:
            self.lack_data(("repair",), "'repair' measures the units of the models on data: it needs 'data'")
        repair = self.data.get("repair")
        if isinstance(repair, dict) and repair.get("goals") == "own" and not self.each:
            self.add(("repair", "goals"), "goals own needs data beside every model; use expert or mean goals")
        for key in ("slices", "modules"):
            if self.has(key):
                self.add(
                    ("repair",), f"'repair' compares units by their place in whole models: use 'models', not '{key}'"
                )
        if self.has("tokenizer"):
            self.add(("repair",), f"'repair' runs the models on data, and {ONE_TABLE}")

    def align(self) -> None:
        align = self.data.get("align")
        if not isinstance(align, dict):
            return
        if align.get("data") is not None or self.has("data") or self.each or not self.looks:
            return
        if align.get("learn"):
            self.lack_data(("align", "learn"), "it is learned on data: give the recipe 'data', or 'align' its own")
        else:
            self.lack_data(
                ("align", "evidence"), "activations are seen on data: give the recipe 'data', or 'align' its own"
            )

    # --- what nothing uses --------------------------------------------------------------------------------------------
    def unused(self) -> Iterator[tuple[Path, str]]:
        """Every key that is given and without effect, and why it is."""
        yield from self._unused_of_models()
        if self.data.get("calibrate") is not None and self.measured is None:
            known = ", ".join(sorted(name for name, one in METHODS.items() if one.measures))
            text = f"'calibrate' is for methods that weigh by what is measured on data: {known}"
            if self.files:
                text = f"{self.method.name} has files of statistics, so nothing is measured: leave 'calibrate' out"
            yield ("calibrate",), text
        yield from self._unused_of_align()
        yield from self._unused_data()

    def _unused_of_models(self) -> Iterator[tuple[Path, str]]:
        if (
            self.measured
            or self.whole in ("each", "task", "together", "any")
            or (self.each and (self.has("repair") or self.looks))
        ):
            return
        why = f"{self.method.name} has files of statistics" if self.files else f"{self.method.name} does not"
        for path, entry in self.entries:
            if entry.get("data") is not None:
                yield (*path, "data"), f"a model's own data is for methods that look at each model's; {why}"

    def _unused_of_align(self) -> Iterator[tuple[Path, str]]:
        align = self.data.get("align")
        if not isinstance(align, dict):
            return
        some = align.get("data") is not None or self.has("data") or (self.each and self.looks)
        for key in ("measure", "site"):
            if align.get(key) is not None and (not some or align.get("evidence") == "weights"):
                yield ("align", key), f"'{key}' is about activations, and the weights decide here: leave it out"
        if align.get("data") is not None and align.get("evidence") == "weights" and not align.get("learn"):
            step = "leave 'data' out, or let the evidence be activations or mix"
            yield ("align", "data"), f"nothing uses it: the evidence is the weights; {step}"

    def _unused_data(self) -> Iterator[tuple[Path, str]]:
        if not self.has("data") or self.has("repair"):
            return
        own = [entry.get("data") is not None for _, entry in self.entries]
        by_method = self.whole in ("one", "task", "optional", "any") or (
            (self.whole == "together" or self.measured) and not (own and all(own))
        )
        align = self.data.get("align")
        settings = align if isinstance(align, dict) else {}
        looks = settings.get("evidence") != "weights" or bool(settings.get("learn"))
        by_align = bool(align or align == {}) and settings.get("data") is None and looks
        if not by_method and not by_align:
            method = f"{self.method.name} {'has its files' if self.files else 'takes none here'}"
            steps = "neither an 'align' that looks at activations nor 'repair'"
            yield ("data",), f"nothing uses it: {method}, and there is {steps}; leave 'data' out"
