"""`isomerge merge A B --method reconstruct --data PATH`: merging by features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isomerge.cli.common import Voice, written_record
from isomerge.cli.request import Request, numbers
from isomerge.errors import RequestError

RECONSTRUCT = "reconstruct"


def reconstruct_models(
    request: Request,
    data: Path | None,
    split: str | None,
    limit: int | None,
    weights: str | None,
    align: bool | dict[str, str],
    device: str,
    voice: Voice,
    output: dict[str, Any],
) -> dict[str, Any]:
    """Merge by features: the whole model at once, with data."""
    if data is None:
        raise RequestError(
            f"--method {RECONSTRUCT} needs data to run the models on. Name it with --data; no labels are used."
        )
    if request.recipe is not None or len(request.models) < 2:
        raise RequestError(f"--method {RECONSTRUCT} needs at least two models: isomerge merge A B --data PATH -o OUT.")
    shares = numbers(weights, len(request.models)) if weights is not None else None
    options: dict[str, Any] = {}
    for key, text in request.options.items():
        if key not in ("ridge", "floor"):
            raise RequestError(f"--{key} is not an option of {RECONSTRUCT}, which has --ridge and --floor.")
        options[key] = float(text)

    from isomerge.checkpoint import open_checkpoint
    from isomerge.data import open_data
    from isomerge.merge.merged import peak_memory
    from isomerge.merge.reconstruct import reconstruct

    with voice.work("steps") as progress:
        examples = open_data(data, split=split)
        batches = examples.passes(open_checkpoint(request.models[0]), limit=limit)
        merged = reconstruct(
            request.models, batches, weights=shares, align=align, device=device, progress=progress, **options
        )
        written = merged.save(**output)
    about = {"name": examples.name, "sha256": examples.sha256, "size": examples.size}
    return {"method": RECONSTRUCT, "models": request.models, "aligned": bool(align), "data": about,
            "peak_memory_bytes": peak_memory(), **merged.report(), **written_record(written)}  # fmt: skip
