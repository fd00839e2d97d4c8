"""From a recipe to one plan per tensor of the output, by headers only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from isomerge.checkpoint import Checkpoint, is_harmless_buffer
from isomerge.checkpoint.base import name_some
from isomerge.errors import RequestError, near_miss
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods import Method
from isomerge.merging.methods.method import REQUIRED
from isomerge.merging.plan.model_parts import (
    TABLE,
    ModelPart,
    ModelParts,
    natural,
    of_another_class,
    part_called,
    read_build,
    tie_flag,
)
from isomerge.merging.plan.option_values import UNSET, OptionResolver, is_filters, rejections
from isomerge.merging.plan.slices import LayerRange, LayerSlice, Origin, depth_changes, slices_of
from isomerge.merging.plan.tables import UnequalTables
from isomerge.merging.plan.tensor_plan import RecipePlan, TensorInput, TensorPlan
from isomerge.merging.recipe.definitions import Recipe
from isomerge.merging.recipe.entries import parameter_blocks
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Problems

COPY = "passthrough"
MOST_SHAPES = 20  # of one kind in a message; nobody reads the three-hundredth
FEW_SHAPES = 3  # of models that differ in size, where all tensors have the same reason


def plan_tensors(recipe: Recipe, checkpoints: Mapping[ModelReference, Checkpoint]) -> RecipePlan:
    """The plan of every tensor, or one error with everything that does not fit."""
    problems = Problems(f"planning {recipe.places.source}")
    models = recipe.referenced_models()
    absent = [str(model) for model in models if model not in checkpoints]
    if absent:
        raise RequestError(
            f"While planning {recipe.places.source}: {', '.join(absent)} was not opened. Open every model."
        )
    planner = _Planner(recipe, {m: read_build(checkpoints[m], list(recipe.modules or ())) for m in models}, problems)
    planner.plan()
    problems.raise_if_any()
    tensors = {name: planner.tensors[name] for name in sorted(planner.tensors, key=natural)}
    tables = planner.unequal.notes()
    notes = list(dict.fromkeys([*planner.notes, *tables]))
    return RecipePlan(tensors, planner.donor, planner.config_changes, notes, tables, planner.unequal.tokens_of)


class _Planner:
    def __init__(self, recipe: Recipe, builds: dict[ModelReference, ModelParts], problems: Problems) -> None:
        self.recipe, self.builds, self.problems = recipe, builds, problems
        self.method = ALL_METHODS[recipe.merge_method]
        self.donor = recipe.referenced_models()[0]
        self.resolver = OptionResolver(recipe.places)
        self.tensors: dict[str, TensorPlan] = {}
        self.config_changes: dict[str, Any] = {}
        self.notes: list[str] = []
        self.unequal = UnequalTables()
        self._missing: dict[ModelReference, list[str]] = defaultdict(list)
        self._shapes: list[str] = []
        self._vocabularies: list[str] = []
        self._unset: dict[str, list[str]] = defaultdict(list)
        self._copied: list[str] = []
        self._mixed: list[str] = []

    def plan(self) -> None:
        depths = [{name: part.depth for name, part in build.parts.items()} for build in self.builds.values()]
        free = getattr(self.method, "any_architecture", False) or getattr(self.method, "parts", False)
        if free or (getattr(self.method, "any_depth", False) and any(own != depths[0] for own in depths)):
            for part in self.builds[self.donor].parts.values():  # the method says which layers go together
                self._copy_part(part)
            return
        parts = slices_of(self.recipe, self.builds, self.donor, self.problems, self.notes)
        if self.problems.found:  # ranges are wrong: their tensors would only repeat it
            return
        for name, part in self.builds[self.donor].parts.items():
            if name in parts:
                self._part(part, parts[name])
            else:
                self._copy_part(part)
        self._report()
        self._check_filters()
        if isinstance(self.method, Method) and not self.problems.found:
            for text in rejections(self.method, self.tensors.values()):
                self.problems.general(text)

    # --- parts --------------------------------------------------------------------------------------------------------
    def _part(self, part: ModelPart, slices: list[LayerSlice]) -> None:
        for name in self._names_around(slices[0], part.name, "before"):
            self._tensor(name, [(source, name) for source in slices[0].sources], slices[0], 0)
        depth = 0
        for one in slices if part.depth else []:
            for offset in range(one.length):
                # A single layer counts as the end of a gradient, as in mergekit.
                self._layer(part, one, offset, depth, offset / (one.length - 1) if one.length > 1 else 1)
                depth += 1
        for name in self._names_around(slices[-1], part.name, "after"):
            self._tensor(name, [(source, name) for source in slices[-1].sources], slices[-1], 0)
        if part.beyond and depth != part.depth:
            text = (
                f"{part.beyond[0]} is beyond the {part.depth} layers config.json counts and belongs after the last one"
            )
            self.problems.general(f"{text}; this model's layers cannot be stacked anew")
        if part.depth and self._stacks(part.name):
            origins = [self._origin(one, offset) for one in slices for offset in range(one.length)]
            changes, notes = depth_changes(self._config(), part, part.depth, origins)
            self.config_changes |= changes
            self.notes += notes

    def _stacks(self, part: str) -> bool:
        """Whether the recipe says layer by layer what this part is made of."""
        if self.recipe.modules is None:
            return self.recipe.slices is not None
        build = self.builds[self.donor]
        return any(m.slices is not None and part == part_called(build, name) for name, m in self.recipe.modules.items())

    def _origin(self, one: LayerSlice, offset: int) -> Origin:
        source = next((s for s in one.sources if s.model == self.donor), one.sources[0])
        return self.builds[source.model].checkpoint.config, source.start + offset

    def _names_around(self, one: LayerSlice, part: str, side: str) -> list[str]:
        names: dict[str, None] = {}
        for source in one.sources:
            own = self.builds[source.model].parts.get(part)
            names |= dict.fromkeys(getattr(own, side) if own else ())
        return list(names)

    def _layer(self, part: ModelPart, one: LayerSlice, offset: int, number: int, t: float) -> None:
        rests: dict[str, None] = {}
        for source in one.sources:
            rests |= dict.fromkeys(self._own(source, part).layers[source.start + offset])
        for rest in rests:
            inputs = [(s, self._own(s, part).layer_tensor(s.start + offset, rest)) for s in one.sources]
            self._tensor(part.layer_tensor(number, rest), inputs, one, t)

    def _own(self, source: LayerRange, part: ModelPart) -> ModelPart:
        return self.builds[source.model].parts[part.name]

    def _config(self) -> dict[str, Any]:
        """The donor's config.json with what is already known to change."""
        return {**self.builds[self.donor].checkpoint.config, **self.config_changes}

    def _copy_part(self, part: ModelPart) -> None:
        names = [*part.before, *part.after]
        names += [part.layer_tensor(i, rest) for i, rests in enumerate(part.layers) for rest in rests]
        for name in names:
            self._copy(name, TensorInput(self.donor, name))

    # --- tensors ------------------------------------------------------------------------------------------------------
    def _tensor(self, name: str, wanted: list[tuple[LayerRange, str]], one: LayerSlice, t: float) -> None:
        held = [(s, n) for s, n in wanted if n in self._checkpoint(s).tensors]
        if is_harmless_buffer(name) and (len(held) < len(wanted) or not self._floating(held) or self._differ(held)):
            first = next(((s, n) for s, n in held if s.model in (self.donor, wanted[0][0].model)), None)
            if first is not None:
                # The mask or the numbers of the longest table of positions: the first of equally large ones.
                source, tensor = max([first, *held], key=lambda one: math.prod(self._shape(*one)))
                self._copy(name, TensorInput(source.model, tensor))
            return
        present = self._with_stand_ins(name, wanted, held)
        if present is None:
            return
        vocabulary = any(self.builds[s.model].is_vocabulary(n) for s, n in present)
        whole = [str(s.model) for s, n in present if not self._floating([(s, n)])]
        if whole and len(whole) < len(present):
            self._mixed.append(f"'{name}' holds whole numbers in {name_some(whole)} and fractions in the others")
            return
        longest = self._longest(name, present, vocabulary, one.base)
        if whole:
            self._copied.append(name)
            source, tensor = next(((s, n) for s, n in present if s.model == self.donor), present[0])
            self._copy(name, TensorInput(source.model, tensor), vocabulary)
            return
        base = next((TensorInput(s.model, n) for s, n in present if s.model == one.base), None)
        inputs = tuple(TensorInput(s.model, n) for s, n in present if s.model != one.base)
        asked = [(s, n) for s, n in wanted if s.model != one.base]  # filters look at the name a model should have
        options, origins = self._options(name, asked, one, t)
        self.tensors[name] = TensorPlan(name, inputs, base, self.method.name, options, origins, vocabulary, longest)

    def _copy(self, name: str, source: TensorInput, vocabulary: bool = False) -> None:
        self.tensors[name] = TensorPlan(name, (source,), None, COPY, {}, {}, vocabulary)

    def _checkpoint(self, source: LayerRange) -> Checkpoint:
        return self.builds[source.model].checkpoint

    def _floating(self, inputs: list[tuple[LayerRange, str]]) -> bool:
        return all(self._checkpoint(s).tensors[n].dtype.is_floating_point for s, n in inputs)

    def _with_stand_ins(
        self, name: str, wanted: list[tuple[LayerRange, str]], held: list[tuple[LayerRange, str]]
    ) -> list[tuple[LayerRange, str]] | None:
        """The inputs, a tied output table being read where it is: at the input. None if there is nothing to merge."""
        if len(held) == len(wanted):
            return held
        available, lacking = [], []
        for source, tensor in wanted:
            own = tensor if (source, tensor) in held else self.builds[source.model].stand_in(tensor)
            if own is None:
                lacking.append((source, tensor))
            else:
                available.append((source, own))
        for source, tensor in lacking:
            self._missing[source.model].append(tensor)
        if lacking:
            return None
        if TABLE.search(name) or name.endswith(".bias"):
            tables = {self.builds[source.model].table for source, _ in wanted}
            return None if name.endswith(".bias") or (len(tables) == 1 and name not in tables) else available
        if all(tie_flag(self._checkpoint(source).config) for source, _ in held):
            self.notes.append(f"{name} is tied to the input table in every model and is not stored again")
            return None
        return self._untied(name, available)

    def _untied(self, name: str, inputs: list[tuple[LayerRange, str]]) -> list[tuple[LayerRange, str]]:
        config = self._config()
        if config and tie_flag(config) is not False:
            nested = "tie_word_embeddings" not in config and "tie_word_embeddings" in (config.get("text_config") or {})
            changed = {"tie_word_embeddings": False}
            self.config_changes |= {"text_config": {**config["text_config"], **changed}} if nested else changed
        self.notes.append(f"{name} is tied to the input table in some of the models; the output has one of its own")
        return inputs

    def _shape(self, source: LayerRange, tensor: str) -> tuple[int, ...]:
        return self._checkpoint(source).tensors[tensor].shape

    def _differ(self, inputs: list[tuple[LayerRange, str]]) -> bool:
        return len({self._shape(*one) for one in inputs}) > 1

    def _longest(
        self, name: str, inputs: list[tuple[LayerRange, str]], vocabulary: bool, base: ModelReference | None
    ) -> TensorInput | None:
        """Where only the number of rows differs and row i means the same in all: the longest table, the base's first
        of equally long ones. Other tensors of different shapes are a problem."""
        if not self._differ(inputs) or getattr(self.method, "any_width", False):
            return None
        rows_only = len({self._shape(*one)[1:] for one in inputs}) == 1
        if rows_only and vocabulary and self.recipe.tokenizer is not None:
            return None
        text = f"{name} is " + ", ".join(f"{self._shape(s, n)} in {s.model}" for s, n in inputs)
        ordered = sorted(inputs, key=lambda one: one[0].model != base)
        tables = {TensorInput(s.model, n): self._checkpoint(s) for s, n in ordered}
        why = self.unequal.why_not(tables, vocabulary) if rows_only else ""
        if why is None and isinstance(self.method, Method):
            longest, changes = self.unequal.add(name, tables, vocabulary, self._config())
            self.config_changes |= changes
            return longest
        if rows_only and vocabulary:
            self._vocabularies.append(f"{text}{f'; {why}' if why else ''}")
        else:
            self._shapes.append(text)
        return None

    # --- options ------------------------------------------------------------------------------------------------------
    def _options(
        self, name: str, inputs: list[tuple[LayerRange, str]], one: LayerSlice, t: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        options: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for option in self.method.options:
            if option.per_model:
                pairs = [self.resolver.find(option, one.scopes_of(s), tensor, t) for s, tensor in inputs]
            else:
                pairs = [self.resolver.find(option, one.scopes, name, t)]
            if option.default is REQUIRED and any(value is UNSET for value, _ in pairs):
                self._unset[option.name].append(name)
                continue
            pairs = [(option.default, "default") if value is UNSET else (value, origin) for value, origin in pairs]
            if option.kind is int and any(isinstance(value, float) for value, _ in pairs):
                text = f"'{option.name}' must be a whole number, and its gradient gives {pairs[0][0]} for {name}"
                self.problems.general(f"{text}; {pairs[0][1]}")
            options[option.name] = [value for value, _ in pairs] if option.per_model else pairs[0][0]
            if len({origin for _, origin in pairs}) == 1:
                origins[option.name] = pairs[0][1]
            else:
                origins |= {f"{option.name} of {s.model}": o for (s, _), (_, o) in zip(inputs, pairs, strict=True)}
        return options, origins

    # --- what does not fit --------------------------------------------------------------------------------------------
    def _report(self) -> None:
        for model, names in self._missing.items():
            lacks = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
            step = (
                "if it is incomplete, get it again from where it came; if the others have more than their architecture "
                "needs (another head, what training left), save them without"
            )
            if renamed := of_another_class(names, self.builds[model].checkpoint.tensors):
                step = f"it {renamed}"
            self.problems.general(f"{model} lacks {lacks} that others have: {name_some(names)}; {step}")
        for text in _shortened(self._mixed):
            self.problems.general(f"{text}; use a copy that stores it as the others do")
        if self._shapes:
            more = f"; and {len(self._shapes) - FEW_SHAPES} more tensors" if len(self._shapes) > FEW_SHAPES else ""
            self.problems.general(
                f"{'; '.join(self._shapes[:FEW_SHAPES])}{more}; tensors of different shapes cannot be merged, but "
                "reconstruct with joint features takes models of other widths and depths"
            )
        for text in _shortened(self._vocabularies):
            remedy = "set tokenizer to union to match tokens by text"
            self.problems.general(f"{text}; the vocabularies differ: {remedy}", key="tokenizer")
        for option, names in self._unset.items():
            text = f"{self.method.name} needs '{option}', and no filter gives it for {name_some(names)}"
            self.problems.add(self.recipe.places, ("parameters", option), f"{text}; add an entry without a filter")
        if self._copied:
            self.notes.append(f"{name_some(self._copied)}: whole numbers, copied and not merged")

    def _check_filters(self) -> None:
        """A filter that is in no tensor's name is a typing mistake; one that is never used deserves a word."""
        names = {*self.tensors, *(name for build in self.builds.values() for name in build.checkpoint.tensors)}
        every = "\n".join(names)
        places = self.recipe.places
        for path, block, _ in parameter_blocks(self.recipe):
            for option, setting in block.items():
                for i, entry in enumerate(setting if is_filters(setting) else ()):
                    place, text = (*path, option, i), entry.filter
                    if text not in (None, "*") and text not in every:
                        hint = near_miss(text, sorted({word for name in names for word in name.split(".")}))
                        problem = f"the filter '{text}' of '{option}' is in no tensor's name. {hint}"
                        self.problems.add(places, place, problem.strip())
                    elif place not in self.resolver.used:
                        which = "the entry without a filter" if text is None else f"the filter '{text}'"
                        self.notes.append(f"{places.where(place)}: {which} of '{option}' is never used")


def _shortened(texts: list[str]) -> list[str]:
    if len(texts) <= MOST_SHAPES:
        return texts
    return [*texts[:MOST_SHAPES], f"and {len(texts) - MOST_SHAPES} more tensors of this kind"]
