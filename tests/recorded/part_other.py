"""Recipes with layer stacks and gradients, plans, barriers, evaluations and verdicts."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from recorded.doors import isomerge, said
from recorded.models import batches, model, scratch, tuned
from recorded.part_align import Results, pair

ROW = "llama-lm"
numbers = itertools.count()


def results() -> Results:
    yield from recipes()
    yield from measures()


# --- recipes ----------------------------------------------------------------------------------------------------------
def recipes() -> Results:
    a, b = tuned(ROW, 2)
    both = [{"model": a}, {"model": b}]
    ranges = [{"model": m, "layer_range": [0, 2]} for m in (a, b)]
    single = [{"sources": [{"model": m, "layer_range": r}]} for m, r in ((a, [0, 2]), (b, [0, 1]), (a, [1, 2]))]
    stack = {"merge_method": "passthrough", "slices": single}
    yield "recipe/stack", lambda: recipe(**stack)
    yield "recipe/stack of merged layers", lambda: recipe(
        merge_method="slerp", base_model=a, slices=[{"sources": ranges}, {"sources": ranges, "parameters": {"t": 0.9}}],
        parameters={"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]},
    )  # fmt: skip
    yield "recipe/gradient", lambda: recipe(
        merge_method="linear", models=[{"model": a, "parameters": {"weight": [0, 0.5, 1]}},
                                       {"model": b, "parameters": {"weight": [1, 0.2]}}],
    )  # fmt: skip
    yield "recipe/filters", lambda: recipe(
        merge_method="ties", base_model=model(ROW), models=both,
        parameters={"density": [1, 0.5, 0.2], "lambda": {"filter": "mlp", "value": 0.8},
                    "weight": [{"filter": "self_attn", "value": [0.3, 0.6]}, {"value": 1.0}]},
    )  # fmt: skip
    yield "recipe/aligned gradient", lambda: recipe(
        merge_method="linear", models=[{"model": model(ROW, 0), "parameters": {"weight": [0, 1]}}, {"model": b},
                                       {"model": model(ROW, 1)}], align=True,
    )  # fmt: skip
    seq = {"merge_method": "linear", "out_dtype": "float32"}
    t5 = [{"model": folder} for folder in tuned("t5-lm", 2)]
    yield (
        "recipe/modules",
        lambda: recipe(
            **seq,
            modules={"encoder": {"models": t5}, "decoder": {"models": t5[::-1], "parameters": {"weight": [0.2, 1]}}},
        ),
    )
    yield (
        "recipe/two documents",
        lambda: merged_text(
            f"name: first\nmerge_method: linear\nmodels: [{{model: {a}}}, {{model: {b}}}]\n---\n"
            f"merge_method: task_arithmetic\nbase_model: {model(ROW)}\nmodels: [{{model: first}}, {{model: {a}}}]\n"
        ),
    )
    for dtype in ("bfloat16", "float16", "float32"):
        yield f"recipe/out {dtype}", lambda d=dtype: recipe(merge_method="linear", models=both, out_dtype=d)
        yield f"recipe/stored {dtype}", lambda d=dtype: stored(d)
    yield "recipe/command line", command_line
    yield "plan/stack", lambda: plan(stack)
    yield "plan/ties", lambda: plan({"merge_method": "ties", "base_model": model(ROW), "models": both})
    yield "plan/explain", lambda: explained(both)


def recipe(**document: Any) -> Any:
    return isomerge.merge_recipe(document, threads=1).state_dict()


def merged_text(text: str) -> Any:
    return isomerge.merge_recipe(text, threads=1).state_dict()


def fresh() -> Path:
    return scratch() / f"out-{next(numbers)}"


def written(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def stored(dtype: str) -> dict[str, Any]:
    """Written in another dtype, in several files."""
    out = fresh()
    isomerge.merge(tuned("gpt2-lm", 2), threads=1).save(out, out_dtype=dtype, shard_size="4KB")
    return written(out)


def command_line() -> dict[str, Any]:
    out = fresh()
    flags = ("--method", "ties", "--base", model(ROW), "--density", "0.5", "--weights", "0.4,0.6", "--threads", "1")
    said("merge", *tuned(ROW, 2), "-o", out, *flags)
    return written(out)


def plan(document: dict[str, Any]) -> dict[str, Any]:
    record = said("plan", recipe_file(document), "--threads", "1")
    return {key: record[key] for key in ("method", "tensors", "bytes_read", "bytes_written", "config_changes")}


def explained(both: list[dict[str, Any]]) -> dict[str, Any]:
    document = {"merge_method": "ties", "base_model": model(ROW), "models": both, "parameters": {"density": [1, 0.2]}}
    record = said("plan", recipe_file(document), "--explain", "model.layers.1.mlp.up_proj.weight")
    return {name: option["value"] for name, option in record["options"].items()}


def recipe_file(document: dict[str, Any]) -> Path:
    path = scratch() / f"recipe-{next(numbers)}.yml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


# --- barriers, planes, evaluations, verdicts --------------------------------------------------------------------------
def measures() -> Results:
    for row in ("vit-image", "bert-token", ROW, "gpt2-lm"):
        yield f"barrier/{row}", lambda r=row: line(r)
        yield f"evaluate/{row}", lambda r=row: chosen(isomerge.evaluate(model(r), batches(r)), ("loss", "metric"))
    yield "barrier/permutation", lambda: line("vit-image", level="permutation")
    yield (
        "plane/vit",
        lambda: chosen(
            isomerge.plane(*(model("vit-image", s) for s in range(3)), data=batches("vit-image"), points=3, align=True),
            ("x", "y", "loss", "metric"),
        ),
    )
    yield (
        "ensemble/vit",
        lambda: chosen(
            isomerge.ensemble([model("vit-image", s) for s in range(3)], batches("vit-image"))["ensemble"],
            ("loss", "metric"),
        ),
    )
    for row in ("vit-image", "llama-lm-tied", "bert-lm"):
        yield f"distance/{row}", lambda r=row: isomerge.align(*pair(r), threads=1).report()["distance"]
    for row in ("vit-image", ROW, "bert-lm", "t5-lm"):
        yield f"check/{row}/strangers", lambda r=row: judged(*pair(r))
        yield f"check/{row}/siblings", lambda r=row: judged(*tuned(r, 3), base=model(r))
        yield f"check/{row}/identical", lambda r=row: judged(model(r), copied(model(r)))


def line(row: str, **options: Any) -> dict[str, Any]:
    record = isomerge.barrier(model(row, 0), model(row, 1), data=batches(row), points=5, align=True, **options)
    keys = ("points", "barrier", "metric_barrier", "ensemble")
    return {"plain": chosen(record, keys), "aligned": chosen(record["aligned"], keys)}


def chosen(record: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: record[key] for key in keys}


def copied(folder: str) -> str:
    out = fresh()
    shutil.copytree(folder, out)
    return str(out)


def judged(*models: str, base: str | None = None) -> dict[str, Any]:
    record = isomerge.check(*models, base=base)
    keys = ("verdict", "weights", "distance", "cosine", "sign_conflict", "norm_ratio", "alignment_helps", "alignment")
    pairs = [chosen(one, ("verdict", "distance", "cosine", "sign_conflict")) for one in record["pairs"]]
    return {**chosen(record, keys), "pairs": pairs}
