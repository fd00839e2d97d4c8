"""From a recipe, its plan and what was prepared for it to the merged model: one job for every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.checkpoint import Checkpoint, parse_dtype
from isomerge.checkpoint.saving import dtype_entry
from isomerge.merging.assemble import assemble
from isomerge.merging.extras import TensorFiles
from isomerge.merging.merged import Merged
from isomerge.merging.pipeline import Job
from isomerge.merging.prepare import Prepared, repaired_jobs, solved_jobs
from isomerge.merging.recipe import ModelReference, Recipe, RecipePlan
from isomerge.merging.settings import RunSettings
from isomerge.merging.tokens import merged_vocabulary


def combine(
    document: Recipe,
    plan: RecipePlan,
    models: Mapping[ModelReference, Checkpoint],
    made: Prepared,
    settings: RunSettings,
    *,
    solved: bool = True,
    outline: Merged | None = None,
) -> Merged:
    """The merged model, every tensor a job that has yet to run. Not `solved`: only what headers tell is wanted.

    `outline` is an earlier result of the same models and tokenizer settings, whose vocabulary is taken over."""
    donor = models[plan.donor]
    notes, changes = [*plan.notes, *made.notes], {**plan.config_changes, **made.config_changes}
    vocabulary = template = None
    if document.tokenizer is not None:
        vocabulary = outline.vocabulary if outline else merged_vocabulary(document, models, plan)
        assert vocabulary is not None
        changes |= vocabulary.config_changes()
        notes += vocabulary.report.get("notes", [])
    if document.chat_template is not None:
        from isomerge.merging.vocabulary import chat_template

        template = chat_template(document.chat_template, {str(r): c for r, c in models.items()})
    if document.out_dtype or document.dtype:
        changes |= dtype_entry(donor.config, parse_dtype(document.out_dtype or document.dtype or ""))
    files = TensorFiles(settings.statistics)
    jobs = solved_jobs(document, made.solved) if made.solved else assemble(
        document, plan, models, aligned=made.aligned, vocabulary=vocabulary, files=files, measured=made.measured,
        hashes=settings.hashes, seed=document.seed, device=settings.device,
    )  # fmt: skip
    if document.repair is not None and solved:
        jobs, told = repaired_jobs(document, made, jobs, donor, models, {**donor.config, **changes}, settings)
        notes += told
    if not (document.out_dtype or document.dtype):
        changes |= _dtype_change(donor, jobs)
    return Merged(
        recipes=[document],
        inputs={str(reference): checkpoint for reference, checkpoint in models.items()} | files.opened,
        files=frozenset(files.opened),
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


def _dtype_change(donor: Checkpoint, jobs: Sequence[Job]) -> dict[str, Any]:
    """What config.json has to say where the weights are of another dtype than the donor of the config."""
    found = {job.info.dtype for job in jobs if job.info.dtype.is_floating_point}
    said = donor.config.get("dtype", donor.config.get("torch_dtype"))
    if len(found) != 1 or said is None:
        return {}
    (dtype,) = found
    return {} if str(said) == str(dtype).removeprefix("torch.") else dtype_entry(donor.config, dtype)
