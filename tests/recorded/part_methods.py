"""Every method that merges tensor by tensor, on fine-tuned models of one base."""

from __future__ import annotations

from typing import Any

import torch

from recorded.doors import isomerge
from recorded.models import batches, model, settled, tuned
from recorded.part_align import Results, pair

ROW = "gpt2-lm"
OTHER = "llama-lm"
# What a method cannot run without.
NEEDED: dict[str, dict[str, Any]] = {
    "nearswap": {"t": 0.5},
    "rewarded_soup": {"weight": [0.5, 0.3, 0.2]},
    "slerp": {"t": 0.3},
}
# More ways to run each method that has options worth trying beside the defaults.
ALSO: dict[str, list[dict[str, Any]]] = {
    "breadcrumbs": [{"density": 0.6, "gamma": 0.1}, {"density": 0.95, "gamma": 0.2, "paper": True}],
    "breadcrumbs_ties": [{"density": 0.6, "gamma": 0.1, "rescale": True}],
    "consensus_ties": [{"density": 0.5, "normalize": True}, {"elect": False}],
    "dare_linear": [{"density": 0.5}, {"density": 0.5, "paper": True, "rescale": False}],
    "dare_ties": [{"density": 0.5}, {"density": 0.5, "paper": True, "normalize": True}],
    "della": [{"density": 0.5, "epsilon": 0.1}, {"density": 0.5, "epsilon": 0.1, "paper": True, "lambda": 0.7}],
    "della_linear": [{"density": 0.5, "epsilon": 0.1}],
    "karcher": [{"max_iter": 3}],
    "linear": [{"weight": [0.2, 0.5, 0.9]}, {"weight": [0.2, 0.5, 0.9], "normalize": False}],
    "model_stock": [{"filter_wise": True}],
    "multislerp": [{"normalize_weights": False}],
    "nuslerp": [{"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}],
    "ram": [{"epsilon": 0.3}],
    "ramplus_tl": [{"epsilon": 0.3}],
    "sce": [{"select_topk": 0.4}, {"select_topk": 0.4, "paper": True}],
    "sparse_soup": [{"weight": [0.2, 0.5, 0.9], "density": 0.3}],
    "task_arithmetic": [{"weight": [0.4, 0.3, -0.2], "lambda": 0.8}],
    "ties": [{"density": 0.4}, {"density": 0.4, "rescale": True, "normalize": False, "lambda": 0.7}],
    "tsv": [{"share": 0.25}],
}
FEWER = {"arcee_fusion": 1, "passthrough": 1, "wise_ft": 1, "nearswap": 1, "slerp": 1, "nuslerp": 2}
DRAWN = ("dare_linear", "dare_ties", "della", "della_linear")


def methods() -> list[dict[str, Any]]:
    """Those that work on one tensor after another, by the list that users see: a new one is found missing here."""
    return [row for row in isomerge.catalogue("methods") if row["data"] != "required"]


def results() -> Results:
    for method in methods():
        name = method["name"]
        for options in ({}, *ALSO.get(name, [])):
            given = {**NEEDED.get(name, {}), **options}
            label = " ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
            for row in (ROW, OTHER):
                yield f"{name}/{label}/{row}", lambda m=method, o=given, row=row: merged(m, row, **o)
        yield f"{name}/aligned", lambda m=method: merged(m, ROW, align=True, **NEEDED.get(m["name"], {}))
        if method["data"] == "ignored":
            yield f"{name}/state_dicts", lambda m=method: plain(m, **NEEDED.get(m["name"], {}))
    for name in DRAWN:
        method = next(row for row in methods() if row["name"] == name)
        yield f"{name}/seed 7", lambda m=method: merged(m, ROW, density=0.5, seed=7)
    for dtype in ("bfloat16", "float16"):
        for name in ("linear", "ties", "karcher"):
            method = next(row for row in methods() if row["name"] == name)
            yield f"{name}/from {dtype}", lambda m=method, d=dtype: merged(m, ROW, kept=getattr(torch, d))
            yield f"{name}/to {dtype}", lambda m=method, d=dtype: merged(m, ROW, dtype=d)
        yield (
            f"linear/aligned {dtype}",
            lambda d=dtype: isomerge.merge(pair("vit-image", getattr(torch, d)), align=True, threads=1).state_dict(),
        )
    yield "linear/float64", lambda: isomerge.merge(pair("t5-lm"), weights=[0.3, 0.7], threads=1).state_dict()
    yield "linear/strangers aligned", lambda: strangers("bert-lm", align=True)
    yield "linear/strangers aligned universe", lambda: strangers("vit-image", align={"many": "universe"})
    yield (
        "ties/strangers aligned",
        lambda: strangers("vit-image", method="ties", base=model("vit-image", 3), align=True),
    )
    yield "linear/strangers permuted", lambda: strangers("llama-lm", align=True, level="permutation")


def merged(method: dict[str, Any], row: str, *, kept: torch.dtype = torch.float32, **options: Any) -> Any:
    models, base = tuned(row, FEWER.get(method["name"], 3), kept), model(row, 0, kept)
    if method["base"] != "ignored":
        options["base"] = base
    elif method["name"] in FEWER and method["name"] != "passthrough":
        models = [base, *models]
    if method["data"] == "optional":
        options["data"] = [batches(row, seed) for seed in range(len(models))]
        if method["base"] != "ignored":  # its own data: what is known of the base is measured too
            options["data"] = batches(row)
    found = isomerge.merge(models, method=method["name"], threads=1, **options).state_dict()
    return settled(found) if method["data"] == "optional" else found


def plain(method: dict[str, Any], **options: Any) -> Any:
    """Without a file or a config: what a training loop calls."""
    generator = torch.Generator().manual_seed(17)
    shapes = {"bias": (13,), "matrix": (9, 14), "kernel": (6, 3, 2, 2)}
    origin = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    count = FEWER.get(method["name"], 3)
    models = [
        {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in origin.items()}
        for _ in range(count)
    ]
    if method["base"] != "ignored":
        options["base"] = origin
    elif method["name"] in FEWER and method["name"] != "passthrough":
        models = [origin, *models]
    return isomerge.merge_state_dicts(models, method=method["name"], **options)


def strangers(row: str, **options: Any) -> Any:
    return isomerge.merge([model(row, seed) for seed in range(3)], threads=1, **options).state_dict()
