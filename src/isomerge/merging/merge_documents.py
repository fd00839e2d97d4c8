"""From recipes to the merged model: plan and prepare each document, one job for every tensor, repair."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.checkpoint import Checkpoint, TensorInfo, require_floating
from isomerge.checkpoint.dtypes import dtype_entry
from isomerge.checkpoint.kept import KeptWork
from isomerge.engine import require_threads
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.data_methods import DATA_METHODS, MergedWeights
from isomerge.merging.measured_statistics import name_uneven
from isomerge.merging.methods import METHODS
from isomerge.merging.outcome.merged import Merged, MergedCheckpoint
from isomerge.merging.outcome.notes import Strangers, name_strangers, strangers_among
from isomerge.merging.plan.models import base_among_models, differences, left_out_adapters, read_otherwise
from isomerge.merging.plan.tensor_plan import RecipePlan, TensorInput, TensorPlan
from isomerge.merging.plan.tensors import plan_tensors
from isomerge.merging.prepared_models import Models, PreparedModels, RunSettings, check_data, kept_work, prepare
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe_data import repairing_data
from isomerge.merging.repair import finished_job, parents_of, repaired
from isomerge.merging.run.jobs import Job, scaled_by_layer
from isomerge.merging.run.option_files import TensorFiles
from isomerge.merging.run.rows import FirstRows, GramSource, TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.merging.vocabulary import Vocabulary, chat_template
from isomerge.merging.vocabulary.from_recipe import merged_vocabulary, require_same_ids
from isomerge.running.stock import require_device


def merge_documents(
    documents: Sequence[Recipe], checkpoints: Models, settings: RunSettings, *, solve: bool = True, same_ids: bool
) -> Merged:
    """The model of the last document; those before it are its inputs. Without `solve`, as far as headers tell:
    everything is checked, nothing is aligned or computed."""
    start = time.perf_counter()
    known = dict(checkpoints)
    require_device(settings.device)
    if settings.engine.name != "threads":
        _require_spreadable(documents, checkpoints, settings)
    for checkpoint in known.values():
        require_floating(checkpoint)
    notes = differences(list(known.values()), documents, ids=not same_ids)
    notes += left_out_adapters(list(known.values())) + read_otherwise(list(known.values()))
    notes += [note for document in documents for note in base_among_models(document)]
    if same_ids:
        require_same_ids(documents[-1], list(known.values()))
    kept = kept_work(documents, checkpoints, settings) if solve else None
    with kept.unless_it_fails() if kept is not None else contextlib.nullcontext():
        merged, files, warnings = _merge_each(documents, known, checkpoints, settings, kept, solve=solve)
    return replace(
        merged,
        data=list(settings.data.opened.values()),
        recipes=list(documents),
        inputs={str(reference): checkpoint for reference, checkpoint in checkpoints.items()} | files,
        files=frozenset(files),
        notes=notes + merged.notes + name_strangers(merged.strangers) + warnings,
        started=start,
        kept=kept,
    )


def _require_spreadable(documents: Sequence[Recipe], checkpoints: Models, settings: RunSettings) -> None:
    """What other processes can merge: files, tensor by tensor, on processors."""
    for document in documents:
        if document.merge_method in DATA_METHODS or document.repair is not None:
            what = "repair" if document.repair is not None else document.merge_method
            require_threads(settings.engine, "Merging", f"{what} runs whole models, in this process")
    for checkpoint in checkpoints.values():
        if checkpoint.in_memory:
            cause = f"{checkpoint.name} is in the memory of this process, and workers read files"
            require_threads(settings.engine, "Merging", cause)
    if settings.device != "cpu":
        require_threads(settings.engine, "Merging", f"workers use no accelerator, and device is {settings.device}")


def _merge_each(
    documents: Sequence[Recipe],
    known: dict[ModelReference, Checkpoint],
    checkpoints: Models,
    settings: RunSettings,
    kept: KeptWork | None,
    *,
    solve: bool,
) -> tuple[Merged, dict[str, Checkpoint], list[str]]:
    """The model of the last document, the files that options name, and what to warn of."""
    warnings: list[str] = []
    strangers: Strangers = {}
    files: dict[str, Checkpoint] = {}
    for number, document in enumerate(documents):
        settings = replace(settings, kept=kept.within(str(number)) if kept is not None else None)
        models = {reference: known[reference] for reference in document.referenced_models()}
        plan = plan_tensors(document, models)
        if solve:
            prepared = prepare(document, models[plan.donor], models, settings)
        else:
            check_data(document, models, settings)
            prepared = PreparedModels(notes=settings.data.notes)
        merged = merge_document(document, plan, models, prepared, settings, solve=solve)
        if solve and prepared.aligned is None and prepared.solved is None:
            strangers |= strangers_among(plan, {r: checkpoint for r, checkpoint in models.items() if r in checkpoints})
        warnings += name_uneven(merged.jobs, plan) if solve else []
        files |= {name: merged.inputs[name] for name in merged.files}
        if document is not documents[-1]:
            name = str(document.name)
            known[ModelReference.parse(name)] = MergedCheckpoint(merged, name)
    return replace(merged, strangers=strangers), files, warnings


# --- one job for every tensor -----------------------------------------------------------------------------------------
def merge_document(
    recipe: Recipe,
    plan: RecipePlan,
    models: Models,
    prepared: PreparedModels,
    settings: RunSettings,
    *,
    solve: bool = True,
    outline: Merged | None = None,
) -> Merged:
    """The merged model of one document, every tensor a job that has yet to run.

    Without `solve`, only what headers tell is wanted. `outline` is an earlier result of the same models and tokenizer
    settings, whose vocabulary is taken over."""
    donor = models[plan.donor]
    notes, changes = [*plan.notes, *prepared.notes], {**plan.config_changes, **prepared.config_changes}
    vocabulary = template = None
    if recipe.tokenizer is not None:
        vocabulary = (outline.vocabulary if outline else None) or merged_vocabulary(recipe, models, plan)
        changes |= vocabulary.config_changes()
        notes += vocabulary.report.get("notes", [])
    if recipe.chat_template is not None:
        template = chat_template(recipe.chat_template, {str(r): c for r, c in models.items()})
    if prepared.solved is not None and prepared.solved.vocabulary is not None:
        vocabulary = prepared.solved.vocabulary
    dtype = recipe.asked_dtype
    changes |= dtype_entry(donor.config, dtype) if dtype else {}
    files = TensorFiles(settings.statistics)
    if prepared.solved is not None:
        jobs = _solved_jobs(recipe, prepared.solved)
    else:
        jobs = _jobs(recipe, plan, models, prepared, vocabulary, files, settings)
    if recipe.layer_scale is not None:
        jobs = scaled_by_layer(jobs, settings.device)
    if recipe.repair is not None and solve:
        jobs, about_repair = _repaired_jobs(
            recipe, prepared, jobs, donor, models, {**donor.config, **changes}, settings
        )
        notes += about_repair
    if not dtype:
        changes |= _dtype_change(donor, jobs)
    return Merged(
        recipes=[recipe],
        inputs={str(reference): checkpoint for reference, checkpoint in models.items()} | files.opened,
        files=frozenset(files.opened),
        donor=donor,
        jobs=jobs,
        tensor_plans=plan,
        config_changes=changes,
        notes=notes,
        alignment=prepared.alignment,
        details=prepared.solved.record if prepared.solved else {},
        vocabulary=vocabulary,
        chat_template=template,
        hashes=settings.hashes,
        seed=recipe.seed,
        device=settings.device,
        engine=settings.engine,
        threads=settings.threads,
        max_memory=settings.max_memory,
        progress=settings.progress,
    )


def _jobs(
    recipe: Recipe,
    plan: RecipePlan,
    models: Models,
    prepared: PreparedModels,
    vocabulary: Vocabulary | None,
    files: TensorFiles,
    settings: RunSettings,
) -> list[Job]:
    """The jobs, in the order of the plan. A whole-model method is not run here and counts as the mean of the models."""
    dtype = recipe.asked_dtype
    aligned, measured = prepared.aligned, prepared.measured
    jobs = []
    for tensor in _with_untied(plan, aligned).values():
        inputs = tensor.every
        sources: list[TensorSource] = [
            Stored(models[given.model], given.tensor, settings.hashes)
            if aligned is None
            else aligned.source(models[given.model], given.tensor)
            for given in inputs
        ]
        if vocabulary is not None and tensor.vocabulary:
            sources = _in_one_vocabulary(vocabulary, inputs, sources)
        stored = _stored_info(tensor, models, aligned)
        longest = None if tensor.longest is None else sources[inputs.index(tensor.longest)]
        if longest is not None:
            common = min(source.info.shape[0] for source in sources)
            sources = [FirstRows(source, common) for source in sources]
        shape, floating = sources[0].info.shape, stored.dtype.is_floating_point
        method, options, option_tensors = METHODS.get(tensor.method), tensor.options, {}
        if not floating:  # copied, not merged
            method, options = None, {}
        elif method is None:
            method, options = METHODS["linear"], {}
        elif measured is not None and tensor.method == recipe.merge_method:
            option_tensors = measured.sources(tensor, shape)
        else:
            option_tensors = files.sources(tensor, shape, settings.hashes, models=models, aligned=aligned)
        if longest is not None:
            option_tensors = _common_partners(option_tensors, shape[0])
        jobs.append(
            Job(
                tensor.name,
                TensorInfo(
                    shape if longest is None else longest.info.shape,
                    dtype if dtype is not None and floating else stored.dtype,
                ),
                sources[: len(tensor.inputs)],
                sources[-1] if tensor.base else None,
                method,
                options,
                option_tensors,
                recipe.seed,
                settings.device,
                longest,
            )
        )
    return jobs


def _common_partners(options: Mapping[str, Sequence[TensorSource]], common: int) -> dict[str, list[TensorSource]]:
    """What is solved together with tables of different length, their biases, as far as all go."""
    return {
        name: [
            replace(one, other=FirstRows(one.other, common)) if isinstance(one, GramSource) and one.other else one
            for one in sources
        ]
        for name, sources in options.items()
    }


def _in_one_vocabulary(
    vocabulary: Vocabulary, inputs: Sequence[TensorInput], sources: Sequence[TensorSource]
) -> list[TensorSource]:
    """The same table of every model with one row per token of the output."""
    named = {str(given.model): rows for given, rows in zip(inputs, sources, strict=True)}
    shape = sources[0].info.shape
    axis = 1 if len(shape) > 1 and shape[0] == 1 else 0  # a bias of shape (1, tokens)
    return [vocabulary.source(str(given.model), named, axis=axis) for given in inputs]


def _stored_info(tensor: TensorPlan, models: Models, aligned: AlignedTensors | None) -> TensorInfo:
    """What the result keeps where nothing else is asked for: the base's dtype, or the first model's."""
    first = tensor.base or tensor.inputs[0]
    known = models[first.model].tensors
    # A table that alignment has untied is stored under the name of the one it was tied to.
    return known[first.tensor] if first.tensor in known or aligned is None else aligned.plan[first.tensor]


def _with_untied(plan: RecipePlan, aligned: AlignedTensors | None) -> dict[str, TensorPlan]:
    """A rotated stream unties a shared table: the new one is merged as the one it was tied to."""
    if aligned is None:
        return plan.tensors
    tensors = dict(plan.tensors)
    for name in aligned.plan:
        tied = aligned.tied_to(name) if name not in tensors else None
        if tied is not None and tied in tensors:
            like = tensors[tied]
            tensors[name] = replace(
                like,
                name=name,
                inputs=tuple(TensorInput(given.model, name) for given in like.inputs),
                base=TensorInput(like.base.model, name) if like.base else None,
                longest=TensorInput(like.longest.model, name) if like.longest else None,
            )
    return tensors


# --- tensors that are already there -----------------------------------------------------------------------------------
def _solved_jobs(recipe: Recipe, solved: MergedWeights) -> list[Job]:
    """The tensors of a whole-model method: nothing is left but to round and write them."""
    dtype, jobs = recipe.asked_dtype, []
    for name, info in solved.plan.items():
        written = dtype if dtype and info.dtype.is_floating_point else info.dtype
        jobs.append(finished_job(name, TensorInfo(info.shape, written), solved.tensors[name]))
    return jobs


def _repaired_jobs(
    recipe: Recipe,
    prepared: PreparedModels,
    jobs: Sequence[Job],
    donor: Checkpoint,
    models: Models,
    config: Mapping[str, Any],
    settings: RunSettings,
) -> tuple[list[Job], list[str]]:
    """The jobs of the repaired model, and notes."""
    assert recipe.repair is not None
    references, weights, notes = parents_of(recipe)
    if prepared.solved is not None and prepared.solved.parents is not None:
        references = [references[place] for place in prepared.solved.parents]
        weights = [weights[place] for place in prepared.solved.parents]
    aligned = prepared.align() if prepared.align is not None else prepared.aligned
    parents = [models[r] if aligned is None else aligned.as_checkpoint(models[r]) for r in references]
    everyone = list(range(len(references)))
    owners = {
        one: everyone if one == recipe.data else [k for k, r in enumerate(references) if recipe.data_of(r) == one]
        for one in repairing_data(recipe)
    }
    used = {one: own for one, own in owners.items() if own}  # the data of a base are nobody's
    jobs = repaired(
        jobs, parents, config, weights=weights, data=[settings.data.open(one) for one in used],
        owners=list(used.values()), first=donor, settings=recipe.repair, device=settings.device,
        progress=settings.progress,
    )  # fmt: skip
    return jobs, notes


def _dtype_change(donor: Checkpoint, jobs: Sequence[Job]) -> dict[str, Any]:
    """What config.json has to say where the weights are of another dtype than the donor of the config."""
    dtypes = {job.info.dtype for job in jobs if job.info.dtype.is_floating_point}
    declared = donor.config.get("dtype", donor.config.get("torch_dtype"))
    if len(dtypes) != 1 or declared is None:
        return {}
    (dtype,) = dtypes
    return {} if str(declared) == str(dtype).removeprefix("torch.") else dtype_entry(donor.config, dtype)
