"""A recipe's models, slices and modules in one form: for every part of the model, slices with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isomerge.errors import did_you_mean
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.definitions import ModelEntry, Module, OutputSlice, Recipe
from isomerge.merging.recipe.fields import Settings
from isomerge.merging.recipe.names import Build, part_called
from isomerge.merging.recipe.options import base_is_merged
from isomerge.merging.recipe.problems import Path, Problems
from isomerge.merging.recipe.reference import ModelReference
from isomerge.merging.recipe.resolve import Scope
from isomerge.merging.recipe.write import as_data


@dataclass(frozen=True)
class Source:
    """Layers [start, stop) of one model, with the parameters written beside it."""

    model: ModelReference
    start: int
    stop: int
    settings: Settings | None
    path: Path


@dataclass(frozen=True)
class Slice:
    """Sources that are merged layer by layer."""

    sources: tuple[Source, ...]
    base: ModelReference | None
    """The base, if the method has a use for one."""
    scopes: tuple[Scope, ...]
    """What holds for all sources, the nearest first."""

    @property
    def length(self) -> int:
        return self.sources[0].stop - self.sources[0].start

    def scopes_of(self, source: Source) -> tuple[Scope, ...]:
        return (Scope(source.settings, source.path, f"parameters of {source.model}"), *self.scopes)


def slices_of(
    recipe: Recipe, builds: Mapping[ModelReference, Build], donor: ModelReference, problems: Problems, notes: list[str]
) -> dict[str, list[Slice]]:
    """The slices of every part of the donor. Parts that `modules` leaves out have none: they are copied."""
    parts = builds[donor].parts
    shared = (Scope(recipe.parameters, ("parameters",), "parameters of the recipe"),)
    reader = _Reader(recipe, builds, problems, notes)
    if recipe.models is not None:
        return {part: reader.from_models(recipe.models, part, ("models",), shared) for part in parts}
    if recipe.slices is not None:
        stacked = [name for name, part in parts.items() if part.depth]
        if len(stacked) != 1:
            what = "no layers were found" if not stacked else f"the model has layers in {' and '.join(stacked)}"
            problems.add(recipe.places, ("slices",), f"{what}: use 'modules' with the slices of each")
            return {}
        found = {stacked[0]: reader.from_slices(recipe.slices, stacked[0], ("slices",), shared)}
        for part in parts:
            if part not in found and found[stacked[0]]:
                found[part] = [found[stacked[0]][0]]
        return found
    return _from_modules(recipe, builds[donor], reader, shared)


def _from_modules(recipe: Recipe, build: Build, reader: _Reader, shared: tuple[Scope, ...]) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    for name, module in (recipe.modules or {}).items():
        path: Path = ("modules", name)
        part = part_called(build, name)
        if part is None:
            text = f"'{name}' is not a module of this model. {did_you_mean(name, build.parts)}"
            reader.problems.add(recipe.places, path, f"{text} A prefix of tensor names is one too")
            continue
        scopes = (Scope(module.parameters, (*path, "parameters"), f"parameters of module {name}"), *shared)
        found[part] = reader.from_module(module, part, path, scopes)
    left = [name for name in build.parts if name not in found]
    if left:
        reader.notes.append(f"{', '.join(left)} is not among the modules and is copied from {build.checkpoint.name}")
    return found


@dataclass
class _Reader:
    recipe: Recipe
    builds: Mapping[ModelReference, Build]
    problems: Problems
    notes: list[str]

    def from_module(self, module: Module, part: str, path: Path, scopes: tuple[Scope, ...]) -> list[Slice]:
        if module.models is not None:
            return self.from_models(module.models, part, (*path, "models"), scopes)
        return self.from_slices(module.slices or (), part, (*path, "slices"), scopes)

    def from_models(
        self, models: tuple[ModelEntry, ...], part: str, path: Path, scopes: tuple[Scope, ...]
    ) -> list[Slice]:
        """One slice of all layers. A base that is not listed is added, as in mergekit."""
        base = self.recipe.base_model
        entries = [(entry.model, entry.parameters, (*path, i, "parameters")) for i, entry in enumerate(models)]
        if base is not None and base not in [model for model, _, _ in entries] and self._adds(base):
            entries.append((base, None, path))
        sources = tuple(Source(m, 0, self._depth(m, part), s, p) for m, s, p in entries)
        if len({source.stop for source in sources}) > 1:
            depths = ", ".join(f"{source.model} has {source.stop}" for source in sources)
            text = f"the models differ in the number of layers of {part} ({depths}); say with 'slices' which to merge"
            self.problems.add(self.recipe.places, path, text)
            return []
        return [Slice(sources, self._used(base), scopes)]

    def _adds(self, base: ModelReference) -> bool:
        method = ALL_METHODS[self.recipe.merge_method]
        if method.base != "ignored":
            return True
        merged = base_is_merged(method, as_data(self.recipe))
        note = (
            f"{method.name} has no base: {base} is one more of its models, as in mergekit"
            if merged
            else f"{method.name} has no base, and nothing is set for {base}: only its config and side files are used"
        )
        if note not in self.notes:
            self.notes.append(note)
        return merged

    def from_slices(
        self, slices: tuple[OutputSlice, ...], part: str, path: Path, scopes: tuple[Scope, ...]
    ) -> list[Slice]:
        found = []
        for i, one in enumerate(slices):
            here = (*path, i)
            sources = []
            for j, source in enumerate(one.sources):
                at: Path = (*here, "sources", j)
                depth = self._depth(source.model, part)
                if source.layer_range[1] > depth:
                    text = (
                        f"layer_range {list(source.layer_range)} ends beyond {source.model}, which has {depth} layers"
                    )
                    self.problems.add(self.recipe.places, (*at, "layer_range"), f"{text} (0 to {depth - 1})")
                sources.append(Source(source.model, *source.layer_range, source.parameters, (*at, "parameters")))
            if len({source.stop - source.start for source in sources}) > 1:
                lengths = ", ".join(f"{source.stop - source.start} of {source.model}" for source in sources)
                self.problems.add(
                    self.recipe.places, (*here, "sources"), f"the sources differ in length: {lengths} layers"
                )
            own = (Scope(one.parameters, (*here, "parameters"), "parameters of the slice"), *scopes)
            found.append(Slice(tuple(sources), self._used(one.base_model or self.recipe.base_model), own))
        return found

    def _used(self, base: ModelReference | None) -> ModelReference | None:
        return None if ALL_METHODS[self.recipe.merge_method].base == "ignored" else base

    def _depth(self, model: ModelReference, part: str) -> int:
        found = self.builds[model].parts.get(part)
        return found.depth if found else 0
