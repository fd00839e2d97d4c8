"""Alignments: every architecture at every level, siblings, data, many models, stored transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from architectures.rows import ROWS
from recorded.doors import isomerge
from recorded.models import batches, model, scratch, tuned, without_labels

Results = Iterator[tuple[str, Callable[[], Any]]]
LEVELS = ("permutation", "rotation", "full")
DOUBLE = torch.float64
SEEN = {"vit-image": "vit", "bert-token": "bert", "gpt2-lm-untied": "gpt2", "llama-lm": "llama"}
FAMILIES = (
    "vit-image", "bert-lm", "roberta-lm", "llama-lm-tied", "qwen2-lm", "qwen3-lm-tied", "gpt2-lm", "neox-lm", "opt-lm",
    "opt-350m-lm", "distilbert-lm", "deberta-v3-lm", "t5-lm", "mixtral-lm", "gemma2-lm", "olmo2-lm",
    "modernbert-lm", "electra-lm", "albert-lm", "bart-lm", "dinov2-image", "clip", "siglip", "whisper-lm", "swin-image",
    "convnext-image", "resnet-image",
)  # fmt: skip
SIBLINGS = ("vit-image", "bert-lm", "llama-lm", "gpt2-lm", "t5-lm", "mixtral-lm", "deberta-v3-lm", "neox-lm")


def aligned(source: str, anchor: str, **options: Any) -> dict[str, Any]:
    """The moved source, and the objective of every sweep."""
    found = isomerge.align(source, anchor, threads=1, **options)
    return {"tensors": found.state_dict(), **numbers(found)}


def numbers(found: Any) -> dict[str, Any]:
    record = found.report()
    return {"objective": record["objective"], "untied": record["untied"]}


def architectures() -> Results:
    """One model of every family."""
    yield from rows([row for row in ROWS if row in FAMILIES])


def variants() -> Results:
    """All others of the table."""
    yield from rows([row for row in ROWS if row not in FAMILIES])


def rows(names: list[str]) -> Results:
    for row in names:
        for level in LEVELS:
            # float64: what rounding does to one sweep grows over the sweeps, and here it has far to go.
            yield (
                f"{row}/{level}",
                lambda row=row, level=level: aligned(model(row, 1, DOUBLE), model(row, 0, DOUBLE), level=level),
            )


def others() -> Results:
    for row in SIBLINGS:
        yield f"siblings/{row}", lambda row=row: aligned(*tuned(row, 2, DOUBLE))
        yield f"siblings/{row}/far", lambda row=row: aligned(*tuned(row, 2, DOUBLE, spread=0.5))
    for row, name in SEEN.items():
        for evidence in ("activations", "mix", None):
            yield f"data/{name}/{evidence}", lambda row=row, evidence=evidence: seen(row, evidence=evidence)
        by_space = {"residual": "mix", "ffn": "activations"}
        yield f"data/{name}/by space", lambda row=row, by=by_space: seen(row, evidence=by, measure="l2", site="pre")
        yield f"data/{name}/correlation", lambda row=row: seen(row, measure="correlation", limit=15)
    for row in ("vit-image", "llama-lm", "bert-lm"):
        yield f"many/{row}/anchor", lambda row=row: family(row, "anchor", [model(row, 0, DOUBLE)])
        yield f"many/{row}/nearest", lambda row=row: family(row, "anchor", [])
        yield f"many/{row}/universe", lambda row=row: family(row, "universe", [])
    yield "parts/layers", lambda: aligned(*pair("llama-lm"), layers="first 1")
    yield "parts/ffn", lambda: aligned(*pair("bert-lm"), only="ffn")
    yield "parts/attention", lambda: aligned(*pair("vit-image"), only="attention")
    yield "parts/residual", lambda: aligned(*pair("llama-lm"), only="residual")
    yield "parts/no scale", lambda: aligned(*pair("llama-lm"), scale=False)
    yield "parts/one sweep", lambda: aligned(*pair("vit-image"), sweeps=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield f"dtype/{dtype}", lambda dtype=dtype: aligned(*pair("vit-image", dtype), level="permutation")
    yield "transform/stored", stored
    yield (
        "transform/applied",
        lambda: isomerge.align(*pair("vit-image"), threads=1).apply(model("vit-image", 2, DOUBLE)),
    )
    yield "transform/module", lambda: moved_module("llama-lm-tied")


def pair(row: str, dtype: torch.dtype = DOUBLE) -> tuple[str, str]:
    return model(row, 1, dtype), model(row, 0, dtype)


def seen(row: str, **options: Any) -> dict[str, Any]:
    return aligned(*pair(row), data=without_labels(batches(row, dtype=DOUBLE)), **options)


def family(row: str, many: str, anchor: list[str]) -> dict[str, Any]:
    models = [model(row, seed, DOUBLE) for seed in (1, 2, 3)]
    if many == "universe":
        found = isomerge.align_family([models[0], *anchor, *models[1:]], many=many, threads=1)
    else:
        found = isomerge.align_family(models, anchor=anchor[0] if anchor else None, threads=1)
    return {"members": [{"tensors": member.state_dict(), **numbers(member)} for member in found.members]}


def stored() -> dict[str, Any]:
    path = scratch() / "transform.safetensors"
    isomerge.align(*pair("vit-image"), threads=1).save_transform(path)
    return isomerge.align(model("vit-image", 2, DOUBLE), transform=path, threads=1).state_dict()


def moved_module(row: str) -> dict[str, Any]:
    """A module in, a module out; its tied head is untied on the way."""
    import transformers

    source, anchor = (transformers.AutoModelForCausalLM.from_pretrained(f, dtype=DOUBLE) for f in pair(row))
    return dict(isomerge.align(source, anchor, threads=1).apply(source).state_dict())
