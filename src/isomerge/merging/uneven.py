"""Models whose Fisher information is of another order of magnitude: the merge is nearly the one that has most."""

from __future__ import annotations

from collections.abc import Iterable

from isomerge.kinship import in_few_layers, sampled_rows
from isomerge.merging.pipeline import Job
from isomerge.merging.recipe import RecipePlan

UNEVEN = 50.0
"""Times. Fine-tuned classifiers gained by Fisher merging up to 19 and lost from 86 on (benchmarks/paper/README.md)."""


def name_uneven(jobs: Iterable[Job], plan: RecipePlan) -> list[str]:
    """A note where models count very unequally and nobody asked to normalize; from some rows of three layers."""
    weighed = {job.name: job for job in jobs if _by_information(job) and job.name in plan.tensors}
    sums: dict[str, float] = {}
    for name in in_few_layers(weighed):
        job = weighed[name]
        of = zip(plan.tensors[name].inputs, job.extras["importance"], job.options["weight"], strict=True)
        for given, information, weight in of:
            if weight:
                rows = sampled_rows(name, job.info.shape)
                found = weight * sum(float(information.rows(*some).double().sum()) for some in rows)
                sums[str(given.model)] = sums.get(str(given.model), 0.0) + found
    if len(sums) < 2 or max(sums.values()) <= UNEVEN * min(sums.values()):
        return []
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    times = f"about {sums[most] / sums[least]:,.0f} times" if sums[least] > 0 else "any number of times"
    return [
        f"the Fisher information of {most}, by its weight, is {times} that of {least}, which will hardly count: "
        "a model that is sure of its data has little. With normalize: true (--normalize) all count alike"
    ]


def _by_information(job: Job) -> bool:
    named = job.method is not None and job.method.name == "fisher"
    return named and not job.options.get("normalize") and bool(job.extras.get("importance"))
