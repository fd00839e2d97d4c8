"""A recipe's models, slices and modules in one form: for every part of the model, slices with their sources."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.errors import did_you_mean
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.plan.model_parts import DEPTH_KEYS, ModelPart, ModelParts, part_called
from isomerge.merging.plan.option_values import OptionScope
from isomerge.merging.recipe.definitions import ModelEntry, Module, OutputSlice, Recipe
from isomerge.merging.recipe.fields import Settings
from isomerge.merging.recipe.mergekit import base_is_merged
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Path, Problems


@dataclass(frozen=True)
class LayerRange:
    """Layers [start, stop) of one model, with the parameters written beside it."""

    model: ModelReference
    start: int
    stop: int
    settings: Settings | None
    path: Path


@dataclass(frozen=True)
class LayerSlice:
    """Sources that are merged layer by layer."""

    sources: tuple[LayerRange, ...]
    base: ModelReference | None
    """The base, if the method has a use for one."""
    scopes: tuple[OptionScope, ...]
    """What holds for all sources, the nearest first."""

    @property
    def length(self) -> int:
        return self.sources[0].stop - self.sources[0].start

    def scopes_of(self, source: LayerRange) -> tuple[OptionScope, ...]:
        return (OptionScope(source.settings, source.path, f"parameters of {source.model}"), *self.scopes)


def slices_of(
    recipe: Recipe,
    builds: Mapping[ModelReference, ModelParts],
    donor: ModelReference,
    problems: Problems,
    notes: list[str],
) -> dict[str, list[LayerSlice]]:
    """The slices of every part of the donor. Parts that `modules` leaves out have none: they are copied."""
    parts = builds[donor].parts
    shared = (OptionScope(recipe.parameters, ("parameters",), "parameters of the recipe"),)
    reader = _SliceReader(recipe, builds, problems, notes)
    if recipe.models is not None:
        return {part: reader.from_models(recipe.models, part, ("models",), shared) for part in parts}
    if recipe.slices is not None:
        stacked = [name for name, part in parts.items() if part.depth]
        if len(stacked) != 1:
            what = "no layers were found" if not stacked else f"the model has layers in {' and '.join(stacked)}"
            problems.add(recipe.places, ("slices",), f"{what}: use 'modules' with the slices of each")
            return {}
        slices = {stacked[0]: reader.from_slices(recipe.slices, stacked[0], ("slices",), shared)}
        for part in parts:
            if part not in slices and slices[stacked[0]]:
                slices[part] = [slices[stacked[0]][0]]
        return slices
    return _from_modules(recipe, builds[donor], reader, shared)


def _from_modules(
    recipe: Recipe, build: ModelParts, reader: _SliceReader, shared: tuple[OptionScope, ...]
) -> dict[str, list[LayerSlice]]:
    slices: dict[str, list[LayerSlice]] = {}
    for name, module in (recipe.modules or {}).items():
        path: Path = ("modules", name)
        part = part_called(build, name)
        if part is None:
            text = f"'{name}' is not a module of this model. {did_you_mean(name, build.parts)}"
            reader.problems.add(recipe.places, path, f"{text} A prefix of tensor names is one too")
            continue
        scopes = (OptionScope(module.parameters, (*path, "parameters"), f"parameters of module {name}"), *shared)
        slices[part] = reader.from_module(module, part, path, scopes)
    left = [name for name in build.parts if name not in slices]
    if left:
        reader.notes.append(f"{', '.join(left)} is not among the modules and is copied from {build.checkpoint.name}")
    return slices


@dataclass
class _SliceReader:
    recipe: Recipe
    builds: Mapping[ModelReference, ModelParts]
    problems: Problems
    notes: list[str]

    def from_module(self, module: Module, part: str, path: Path, scopes: tuple[OptionScope, ...]) -> list[LayerSlice]:
        if module.models is not None:
            return self.from_models(module.models, part, (*path, "models"), scopes)
        return self.from_slices(module.slices or (), part, (*path, "slices"), scopes)

    def from_models(
        self, models: tuple[ModelEntry, ...], part: str, path: Path, scopes: tuple[OptionScope, ...]
    ) -> list[LayerSlice]:
        """One slice of all layers. A base that is not listed is added, as in mergekit."""
        base = self.recipe.base_model
        entries = [(entry.model, entry.parameters, (*path, i, "parameters")) for i, entry in enumerate(models)]
        if base is not None and base not in [model for model, _, _ in entries] and self._adds(base):
            entries.append((base, None, path))
        sources = tuple(LayerRange(m, 0, self._depth(m, part), s, p) for m, s, p in entries)
        if len({source.stop for source in sources}) > 1:
            depths = ", ".join(f"{source.model} has {source.stop}" for source in sources)
            whose = "" if part == "default" else f" of {part}"
            text = (
                f"the models differ in the number of layers{whose} ({depths}); say with 'slices' which to merge, or "
                "use reconstruct with joint features and data, which matches layers by what they compute"
            )
            self.problems.add(self.recipe.places, path, text)
            return []
        return [LayerSlice(sources, self._used(base), scopes)]

    def _adds(self, base: ModelReference) -> bool:
        method = ALL_METHODS[self.recipe.merge_method]
        if method.base != "ignored":
            return True
        merged = base_is_merged(method, self.recipe)
        note = (
            f"{method.name} has no base: {base} is one more of its models, as in mergekit"
            if merged
            else f"{method.name} has no base, and nothing is set for {base}: only its config and side files are used"
        )
        if note not in self.notes:
            self.notes.append(note)
        return merged

    def from_slices(
        self, slices: tuple[OutputSlice, ...], part: str, path: Path, scopes: tuple[OptionScope, ...]
    ) -> list[LayerSlice]:
        result = []
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
                sources.append(LayerRange(source.model, *source.layer_range, source.parameters, (*at, "parameters")))
            if len({source.stop - source.start for source in sources}) > 1:
                lengths = ", ".join(f"{source.stop - source.start} of {source.model}" for source in sources)
                self.problems.add(
                    self.recipe.places, (*here, "sources"), f"the sources differ in length: {lengths} layers"
                )
            own = (OptionScope(one.parameters, (*here, "parameters"), "parameters of the slice"), *scopes)
            result.append(LayerSlice(tuple(sources), self._used(one.base_model or self.recipe.base_model), own))
        return result

    def _used(self, base: ModelReference | None) -> ModelReference | None:
        return None if ALL_METHODS[self.recipe.merge_method].base == "ignored" else base

    def _depth(self, model: ModelReference, part: str) -> int:
        own = self.builds[model].parts.get(part)
        return own.depth if own else 0


# --- config.json ------------------------------------------------------------------------------------------------------
Origin = tuple[Mapping[str, Any], int]
"""An output layer's config.json and number in it."""
Key = tuple[tuple[str, ...], str]
"""Where a key stands in config.json, and the key."""


def depth_changes(
    config: Mapping[str, Any], part: ModelPart, old_depth: int, origins: Sequence[Origin]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of config.json that change, whole top-level values, and what to look at by hand."""
    if not config:
        return {}, []
    changed = copy.deepcopy(dict(config))
    notes: list[str] = []
    keys = _depth_keys(changed, part, old_depth)
    if not keys and len(origins) != old_depth:
        notes.append(
            f"config.json has no key that says {part.prefix} has {old_depth} layers; correct it by hand: the output "
            f"has {len(origins)}"
        )
    for path, key in keys:
        _at(changed, path)[key] = len(origins)
    for path in sorted({path for path, _ in keys}):
        notes += _change_lists(_at(changed, path), path, old_depth, origins)
    return {key: value for key, value in changed.items() if value != config.get(key)}, notes


def _depth_keys(config: Mapping[str, Any], part: ModelPart, depth: int) -> list[Key]:
    """The keys that count this part's layers, of all that have its number."""
    keys: list[Key] = []
    holders: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), config)]
    holders += [((key,), value) for key, value in config.items() if isinstance(value, Mapping)]
    for path, holder in holders:
        keys += [(path, key) for key in DEPTH_KEYS if holder.get(key) == depth and type(holder[key]) is int]
    words = set(part.prefix.split("."))
    for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
        if part.name == side or (side in words and part.name not in ("default", "text_decoder")):
            keys = [(p, k) for p, k in keys if other not in k and not any(other in step for step in p)]
            if side == "decoder":  # the keys without a word are the encoder's
                keys = [(p, k) for p, k in keys if side in k or any(side in step for step in p)] or keys
    image = part.name in ("vision_tower", "audio_tower")
    of_images = [(p, k) for p, k in keys if any(w in step for step in p for w in ("vision", "audio", "visual"))]
    return of_images if image else [one for one in keys if one not in of_images]


def _at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for step in path:
        config = config[step]
    return config


def _change_lists(
    holder: dict[str, Any], path: tuple[str, ...], old_depth: int, origins: Sequence[Origin]
) -> list[str]:
    """Lists with one entry per layer follow their layers; numbers that count layers are for the user to look at."""
    notes = []
    for key, value in list(holder.items()):
        if "layer" not in key and "pattern" not in key:
            continue
        if isinstance(value, list) and len(value) == old_depth:
            holder[key] = [_entry(config, path, key, layer, value) for config, layer in origins]
        elif isinstance(value, list) and value and all(type(v) is int and v < old_depth for v in value):
            holder[key] = [i for i, (config, layer) in enumerate(origins) if layer in _list(config, path, key, value)]
        elif type(value) is int and key not in DEPTH_KEYS and len(origins) != old_depth:
            notes.append(f"config.json has {key}: {value}, which may count layers; check it for {len(origins)} of them")
    return notes


def _list(config: Mapping[str, Any], path: tuple[str, ...], key: str, otherwise: list[Any]) -> list[Any]:
    value: Any = config
    for step in path:
        value = value.get(step, {})
    value = value.get(key)
    return value if isinstance(value, list) else otherwise


def _entry(config: Mapping[str, Any], path: tuple[str, ...], key: str, layer: int, otherwise: list[Any]) -> Any:
    own = _list(config, path, key, otherwise)
    return own[layer] if layer < len(own) else otherwise[min(layer, len(otherwise) - 1)]
