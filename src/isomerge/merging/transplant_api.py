"""`isomerge.transplant`: a model in, the same model with another tokenizer out."""

from __future__ import annotations

import os
from typing import Any

import torch

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.choices import NEW_TOKEN_ROWS
from isomerge.errors import RequestError
from isomerge.merging.api import merge
from isomerge.merging.outcome.merged import Merged
from isomerge.progress_bars import Shown, callback, shows_progress


@shows_progress
def transplant(
    model: Any,
    donor: Any,
    *,
    how: str = "omp",
    k: int = 64,
    data: Any = None,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    device: str = "cpu",
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
) -> Merged:
    """Give a model the tokenizer of another one, for instance a draft model that of the model it is to draft for.

    `donor` is the model whose tokenizer, chat template and special tokens the result gets. Tokens that both know
    keep their rows. A new token's row is, by `how`: the combination of at most `k` shared tokens that gives the other
    model's row ("omp"), the mean of the pieces of its text ("subword"), the other model's row ("stored", for siblings
    of one width), the mean of all rows ("mean"), or zeros ("zero"). With `data`, plain texts, the report has the bits
    per byte before and after.

    >>> drafting = isomerge.transplant("model-a", "model-b", how="subword")
    >>> drafting.details["transplant"]["how"]
    'subword'
    """
    progress = callback(progress)
    require_types(
        how=(how, str), k=(k, int), dtype=(dtype, str, torch.dtype, None), threads=(threads, int, None),
        resume=(resume, str, os.PathLike, None),
    )  # fmt: skip
    require_shared_types(device=device, progress=progress)
    require_choice("how", how, NEW_TOKEN_ROWS)
    if model is None or donor is None:
        raise RequestError("Transplanting: model and donor name two models, and one is None.", keys=("model", "donor"))
    return merge(
        [model, donor], method="transplant", how=how, k=k, data=data, dtype=dtype, threads=threads, device=device,
        resume=resume, progress=progress,
    )  # fmt: skip
