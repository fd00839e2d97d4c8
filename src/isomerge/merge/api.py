"""`isomerge.merge`: models in, one model out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isomerge.checkpoint import Checkpoint, is_harmless_buffer, open_checkpoint, parse_dtype, require_floating
from isomerge.checkpoint.saving import dtype_entry
from isomerge.errors import RequestError, did_you_mean
from isomerge.evaluate.device import require_device
from isomerge.merge.assemble import assemble
from isomerge.merge.data_sets import DataSets
from isomerge.merge.differences import differences
from isomerge.merge.extras import TensorFiles
from isomerge.merge.merged import Merged, Progress, as_checkpoint
from isomerge.merge.pipeline import Job
from isomerge.merge.prepare import foresee, prepare, repaired_jobs, solved_jobs
from isomerge.merge.recipe import ModelReference, Recipe, RecipePlan, load_recipe, plan_tensors, recipe_of
from isomerge.merge.settings import RunSettings
from isomerge.merge.whole import EVERY

if TYPE_CHECKING:
    from isomerge.merge.recipe.definitions import TokenSettings
    from isomerge.merge.vocabulary import TokenRule, Vocabulary


def merge(
    models: Sequence[Any],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: Any = None,
    align: bool | Mapping[str, Any] = False,
    level: str = "full",
    scale: bool | None = None,
    sweeps: int = 15,
    data: Any = None,
    calibrate: Mapping[str, Any] | None = None,
    repair: bool | Mapping[str, Any] = False,
    dtype: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Merged:
    """Merge models of one architecture; with `align`, each is first moved next to the anchor, unrounded.

    Models are folders, files, hub ids, `model+adapter` references, state_dicts or modules. `options` are the method's
    own (`isomerge list methods`): one value for all models or a list with one for each. The anchor, and the donor of
    config and side files, is `base` if given, else the first model.

    `data` is what models are run on: a path, a mapping as in recipes, batches, opened data, or a list with one of these
    for each model. Methods that need data, alignment and `repair` use it; `calibrate` says how models are measured.

    >>> isomerge.merge(["model-a", "model-b"], method="ties", base="base", density=0.5).save("merged")  # doctest: +SKIP
    """
    if method not in EVERY:
        raise RequestError(f"Merging: '{method}' is not a merge method. {did_you_mean(method, EVERY)}")
    if not models:
        raise RequestError("Merging: there is no model. Name at least one, and two to have something to merge.")
    if weights is not None:
        options = {"weight": list(weights), **options}
    named, given = _named(models)
    origin = _reference(base, "base") if base is not None else None
    if origin is not None:
        given.setdefault(origin, base)
    if not align and (level, scale, sweeps) != ("full", None, 15):
        raise RequestError("Merging: level, scale and sweeps are of the alignment. Add align=True, or leave them out.")
    shared = {"level": level, "scale": scale, "sweeps": sweeps}
    data_sets = DataSets()
    own = dict(align) if isinstance(align, Mapping) else {}
    if "data" in own:
        own["data"] = data_sets.named(own["data"])
    settings: bool | dict[str, Any] = {**shared, **own} if align else False
    recipe = recipe_of(
        named, method, base=origin, options=options, align=settings, data=data_sets.named(data), calibrate=calibrate,
        repair=repair, dtype=dtype, seed=seed,
    )  # fmt: skip
    checkpoints = {reference: open_model(reference, model) for reference, model in given.items()}
    return _merge([recipe], checkpoints, RunSettings(threads, device, max_memory, progress, data_sets))


def merge_recipe(
    recipe: str | Path | dict[str, Any] | list[Recipe],
    *,
    models: Mapping[str, Any] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Merge as a recipe says: a path, YAML text or a dict. `models` replaces references by state_dicts or modules.

    >>> isomerge.merge_recipe("recipe.yml").save("merged")                                              # doctest: +SKIP
    """
    documents = recipe if isinstance(recipe, list) else load_recipe(recipe)
    if seed is not None:  # into the recipe, which is what the lock file repeats
        documents = [document.model_copy(update={"seed": seed}) for document in documents]
    given = {ModelReference.parse(reference): model for reference, model in (models or {}).items()}
    checkpoints = open_models(documents, given)
    unknown = sorted(str(reference) for reference in set(given) - set(checkpoints))
    if unknown:
        hint = did_you_mean(unknown[0], [str(reference) for reference in checkpoints])
        raise RequestError(f"Merging: models has '{unknown[0]}', which the recipe does not name. {hint}")
    return _merge(documents, checkpoints, RunSettings(threads, device, max_memory, progress))


def open_models(
    documents: Sequence[Recipe], given: Mapping[ModelReference, Any] | None = None
) -> dict[ModelReference, Checkpoint]:
    """Every model that the documents name and do not make themselves, by headers only; all that fail, at once."""
    made = {document.name for document in documents if document.name}
    wanted = dict.fromkeys(
        reference for document in documents for reference in document.referenced_models() if str(reference) not in made
    )
    opened, problems = {}, []
    for reference in wanted:
        try:
            opened[reference] = open_model(reference, (given or {}).get(reference))
        except Exception as error:  # told together with the others below
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        told = " ".join(f"({place}) {error}" for place, error in enumerate(problems, start=1))
        raise RequestError(f"Opening the models of the recipe, {len(problems)} problems: {told}")
    return opened


def planned(documents: Sequence[Recipe]) -> Merged:
    """The merge as far as headers tell: everything is checked, nothing is aligned or computed."""
    return _merge(list(documents), open_models(documents), RunSettings(), solve=False)


def _merge(
    documents: list[Recipe],
    checkpoints: Mapping[ModelReference, Checkpoint],
    settings: RunSettings,
    *,
    solve: bool = True,
) -> Merged:
    start = time.perf_counter()
    known = dict(checkpoints)
    require_device(settings.device)
    for checkpoint in known.values():
        require_floating(checkpoint, allowed=lambda name, of=checkpoint: _is_counter(of, name))  # type: ignore[misc]
    notes = differences(list(known.values()), documents)
    merged: Merged | None = None
    files: dict[str, Checkpoint] = {}
    for place, document in enumerate(documents):
        own = {reference: known[reference] for reference in document.referenced_models()}
        merged = _one(document, plan_tensors(document, own), own, settings, solve=solve)
        files |= {name: found for name, found in merged.inputs.items() if ModelReference.parse(name) not in own}
        if place < len(documents) - 1:
            known[ModelReference.parse(str(document.name))] = as_checkpoint(merged, str(document.name))
    assert merged is not None
    merged.data = list(settings.data.opened.values())
    merged.recipes = list(documents)
    merged.inputs = {str(reference): checkpoint for reference, checkpoint in checkpoints.items()} | files
    merged.notes = notes + merged.notes
    merged.started = start
    return merged


def _one(
    document: Recipe,
    plan: RecipePlan,
    models: Mapping[ModelReference, Checkpoint],
    settings: RunSettings,
    *,
    solve: bool,
) -> Merged:
    donor = models[plan.donor]
    made = prepare(document, donor, models, settings) if solve else foresee(document, models, settings)
    notes, changes = [*plan.notes, *made.notes], {**plan.config_changes, **made.config_changes}
    vocabulary = template = None
    if document.tokenizer is not None:
        vocabulary = _vocabulary(document, models, plan)
        changes |= vocabulary.config_changes()
        notes += vocabulary.report.get("notes", [])
    if document.chat_template is not None:
        from isomerge.merge.vocabulary import chat_template

        template = chat_template(document.chat_template, {str(r): c for r, c in models.items()})
    if document.out_dtype or document.dtype:
        changes |= dtype_entry(donor.config, parse_dtype(document.out_dtype or document.dtype or ""))
    files = TensorFiles()
    jobs = solved_jobs(document, made.solved) if made.solved else assemble(
        document, plan, models, aligned=made.aligned, vocabulary=vocabulary, files=files, measured=made.measured,
        hashes=settings.hashes, seed=document.seed, device=settings.device,
    )  # fmt: skip
    if document.repair is not None and solve:
        jobs, told = repaired_jobs(document, made, jobs, donor, models, {**donor.config, **changes}, settings)
        notes += told
    if not (document.out_dtype or document.dtype):
        changes |= _dtype_change(donor, jobs)
    return Merged(
        recipes=[document],
        inputs={str(reference): checkpoint for reference, checkpoint in models.items()} | files.opened,
        donor=donor,
        jobs=jobs,
        tensor_plans=plan,
        config_changes=changes,
        notes=notes,
        alignment=made.alignment,
        details=made.solved.record if made.solved else {},
        vocabulary=vocabulary,
        chat_template=template,
        hashes=settings.hashes,
        seed=document.seed,
        device=settings.device,
        threads=settings.threads,
        max_memory=settings.max_memory,
        progress=settings.progress,
    )


def _is_counter(checkpoint: Checkpoint, name: str) -> bool:
    """Whole numbers that are no quantised weights: they are copied."""
    return is_harmless_buffer(name) or checkpoint.tensors[name].dtype == torch.int64


def _dtype_change(donor: Checkpoint, jobs: Sequence[Job]) -> dict[str, Any]:
    """What config.json has to say where the weights are of another dtype than the donor of the config."""
    found = {job.info.dtype for job in jobs if job.info.dtype.is_floating_point}
    said = donor.config.get("dtype", donor.config.get("torch_dtype"))
    if len(found) != 1 or said is None:
        return {}
    (dtype,) = found
    return {} if str(said) == str(dtype).removeprefix("torch.") else dtype_entry(donor.config, dtype)


def _named(models: Sequence[Any]) -> tuple[list[ModelReference], dict[ModelReference, Any]]:
    """A reference for every model; one that is given as an object may be there twice."""
    named: list[ModelReference] = []
    for place, model in enumerate(models, start=1):
        reference = _reference(model, f"model {place}")
        if reference in named and not isinstance(model, (str, Path)):
            reference = ModelReference(f"model {place}")
        named.append(reference)
    return named, dict(zip(named, models, strict=True))


def _reference(model: Any, otherwise: str) -> ModelReference:
    """How a recipe calls a model that was given as an object."""
    if isinstance(model, ModelReference):
        return model
    if isinstance(model, (str, Path)):
        return ModelReference.parse(str(model))
    return ModelReference(getattr(model, "name", None) or otherwise)


def open_model(reference: ModelReference, model: Any = None) -> Checkpoint:
    """A model by its header, with its adapter on top."""
    named = model is None or isinstance(model, (str, Path, ModelReference))
    if named and Path(reference.path).is_dir():
        from isomerge.adapters.adapter import is_adapter

        if is_adapter(reference.path):
            raise RequestError(
                f"Opening {reference.path}: it is an adapter and not a model. Write base+adapter to merge the model it "
                "makes, or name nothing but adapters (isomerge merge adapter-a adapter-b -o OUT) to merge these."
            )
    checkpoint = open_checkpoint(reference.path, revision=reference.revision) if named else open_checkpoint(model)
    if reference.adapter is None or not named:
        return checkpoint
    from isomerge.adapters import apply_adapter

    return apply_adapter(checkpoint, reference.adapter, revision=reference.adapter_revision, name=str(reference))


def _vocabulary(document: Recipe, models: Mapping[ModelReference, Checkpoint], plan: RecipePlan) -> Vocabulary:
    from isomerge.merge.vocabulary import merge_vocabularies

    settings = document.tokenizer
    assert settings is not None
    known = {str(reference): checkpoint for reference, checkpoint in models.items()}
    spelled = {reference: str(reference) for reference in models}

    def name_of(model: ModelReference) -> str:
        """As it is known above: another way to write its folder is still the same model."""
        return spelled.get(model, str(model))

    source = name_of(settings.source) if isinstance(settings.source, ModelReference) else settings.source
    rules = {token: _rule(rule, name_of) for token, rule in (settings.tokens or {}).items()}
    wanted = [source, *(rule.source.model for rule in rules.values() if rule.source and rule.source.model)]
    for name in wanted:  # a tokenizer may come from a model that is not merged
        if name not in known and name not in ("union", "base"):
            known[name] = open_model(ModelReference.parse(name))
    return merge_vocabularies(
        known,
        source=source,
        base=str(document.base_model) if document.base_model else None,
        rules=rules,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        rows=_table_lengths(plan, models),
    )


def _table_lengths(plan: RecipePlan, models: Mapping[ModelReference, Checkpoint]) -> dict[str, int]:
    """How many rows each model's tables have, from the tables: a config may say something else."""
    found: dict[str, int] = {}
    for tensor in plan.tensors.values():
        for given in [*tensor.inputs, *([tensor.base] if tensor.base else [])] if tensor.vocabulary else []:
            shape = models[given.model].tensors[given.tensor].shape
            if len(shape) == 2 and shape[0] > 1:
                found.setdefault(str(given.model), shape[0])
    return found


def _rule(given: TokenSettings, name_of: Callable[[ModelReference], str]) -> TokenRule:
    from isomerge.merge.vocabulary import TokenRule, TokenSource

    source = given.source
    if source is None:
        return TokenRule(None, given.force)
    if isinstance(source, ModelReference):
        return TokenRule(TokenSource("model", name_of(source)), given.force)
    if source.kind == "zero":
        return TokenRule(TokenSource("zero"), given.force)
    return TokenRule(TokenSource("model_token", name_of(source.model), source.token, source.token_id), given.force)
