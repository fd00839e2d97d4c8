"""`isomerge.rebase` and `isomerge.rebase_adapter`: a fine-tune, or an adapter, carried to another base."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from isomerge.adapters import Adapter, is_adapter
from isomerge.adapters.extract import ExtractedAdapter
from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.choices import CORRECTIONS, LEVELS
from isomerge.errors import RequestError
from isomerge.merging.api import merge
from isomerge.merging.distill_api import in_batches
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.rebasing.adapter import carried_adapter
from isomerge.progress_bars import Shown, callback, shows_progress


@shows_progress
def rebase(
    tuned: Any,
    base: Any,
    onto: Any,
    *,
    scale: float = 1.0,
    correction: str = "auto",
    level: str = "full",
    ridge: float | None = None,
    data: Any = None,
    batch_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
) -> Merged:
    """Carry a fine-tune from the base it was made from to another one: trained anew, from another seed, or further.

    Models are whatever `isomerge.merge` takes, `base+adapter` among them. The old base is aligned to the new one, and
    what the fine-tune changed is moved by that and added, times `scale`. Bases of one training are siblings and need no
    alignment: the change is added as it is. Between bases that were trained apart, give `data` of the fine-tune's task,
    which needs no labels: with `correction="features"` every linear map is solved again, so that the new base's
    features change as the old one's did; "signs" keeps what goes down the gradient towards the fine-tune's predictions.
    With data, models of another width or depth are carried by maps between their activations.

    Every eighth example is kept aside; `report().to_dict()` has under `rebased` where the fine-tune, its base, the new
    base, plain addition and the result stand there, and the share of the gain that has arrived. Without data nothing is
    measured. `resume` names the folder that `save` will be given, as in `isomerge.merge`.

    >>> merged = isomerge.rebase("finetuned", "base", "new-base", data="cifar10.tar.xz")
    >>> [row["model"] for row in merged.details["rebased"]["held_out"]][-1]
    'result'
    """
    progress = callback(progress)
    require_types(
        scale=(scale, float, int), correction=(correction, str), level=(level, str), ridge=(ridge, float, int, None),
        resume=(resume, str, os.PathLike, None), dtype=(dtype, str, torch.dtype, None),
    )  # fmt: skip
    require_choice("correction", correction, CORRECTIONS)
    require_choice("level", level, LEVELS)
    require_shared_types(batch_size=batch_size, threads=threads, device=device, seed=seed, progress=progress)
    _require_three(tuned, base, onto)
    for model in (tuned, base, onto):
        if isinstance(model, (str, os.PathLike)) and is_adapter(model):
            raise RequestError(
                f"Carrying {model} to another base: it is an adapter and not a model. Use rebase_adapter, which writes "
                f"an adapter of the new base; or name BASE+{model} for a model."
            )
    return merge(
        [tuned, base], method="rebase", base=onto, data=in_batches(data, batch_size), dtype=dtype, threads=threads,
        device=device, seed=seed, resume=resume, progress=progress, scale=scale, correction=correction, level=level,
        ridge=ridge,
    )  # fmt: skip


@shows_progress
def rebase_adapter(
    adapter: Any,
    base: Any,
    onto: Any,
    out: str | os.PathLike[str],
    *,
    scale: float = 1.0,
    level: str = "full",
    force: bool = False,
    device: str = "cpu",
    progress: Shown = None,
) -> ExtractedAdapter:
    """Write a LoRA adapter of `base` as one of `onto`: its updates moved by the alignment of the two bases.

    Each layer keeps its rank, as the move is linear. Tensors that the adapter stores whole (biases, a trained head)
    move too. What the alignment adds to a bias becomes a trained bias. Trained norms change the maps behind them, where
    the alignment rotates the stream; what no low rank holds of that is in `relative_error`.

    >>> old = isomerge.extract("base", "finetuned", "adapter-of-base", rank=4, targets="q_proj|fc1").out
    >>> isomerge.rebase_adapter(old, "base", "new-base", "adapter-of-new-base").relative_error < 1e-5
    True
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(scale=(scale, float, int), level=(level, str), out=(out, str, os.PathLike))
    require_choice("level", level, LEVELS)
    require_shared_types(force=force, device=device, progress=progress)
    _require_three(adapter, base, onto)
    if not isinstance(adapter, (str, os.PathLike, Checkpoint, Adapter)):
        raise RequestError(
            f"Carrying an adapter to another base: it is a {type(adapter).__name__}. Name its folder.",
            keys=("adapter",),
        )
    models = open_checkpoint(base), open_checkpoint(onto)
    return carried_adapter(
        adapter, *models, out, scale=float(scale), level=level, force=force, device=device, progress=progress,
        start=start,
    )  # fmt: skip


def _require_three(tuned: Any, base: Any, onto: Any) -> None:
    for key, model in (("tuned", tuned), ("base", base), ("onto", onto)):
        if model is None or isinstance(model, (list, tuple)):
            raise RequestError(
                f"Carrying a fine-tune to another base: {key} is {model!r:.60}. Name one model.", keys=(key,)
            )
    named = {"tuned": tuned, "base": base, "onto": onto}
    paths = {key: str(model) for key, model in named.items() if isinstance(model, (str, os.PathLike))}
    for one, other, missing in (("base", "onto", "new base"), ("tuned", "base", "base"), ("tuned", "onto", "new base")):
        if one in paths and paths[one] == paths.get(other):
            raise RequestError(
                f"Carrying a fine-tune to another base: {one} and {other} are both {paths[one]}, so there is "
                f"nothing to carry. Name another {missing}.",
                keys=(one, other),
            )
