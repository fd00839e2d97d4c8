"""Everything that runs models over data: statistics, the methods that use them, whole-model methods, repair."""

from __future__ import annotations

from functools import cache
from typing import Any

from recorded.doors import calibrate, cross_statistics, isomerge
from recorded.models import batches, model, scratch, settled, tuned, without_labels
from recorded.part_align import SEEN, Results

# The same model at another width, for what can fuse models of several.
WIDER: dict[str, dict[str, Any]] = {
    "vit-image": {"hidden_size": 24, "intermediate_size": 17},
    "gpt2-lm-untied": {"n_embd": 24, "n_inner": 17},
    "llama-lm": {"hidden_size": 24, "intermediate_size": 17, "head_dim": 4},
}
FUSION: list[dict[str, Any]] = [
    {}, {"cost": "weights"}, {"solver": "sinkhorn", "regularisation": 0.5}, {"mass": "importance"},
    {"heads": "across"}, {"heads": "fixed"}, {"only": "ffn"}, {"only": "attention"}, {"only": "residual"},
    *({"residual": how} for how in ("averaging", "weighted", "weighted_units", "first", "identity")),
]  # fmt: skip
RECONSTRUCT: dict[str, dict[str, Any]] = {
    "mean": {},
    "weighted": {"weights": [0.3, 0.7], "ridge": 0.1, "floor": 1e-5},
    "joint": {"features": "joint"},
    "refined": {"refine": 4},
    "polished": {"polish": 4, "rate": 0.003},
    "joint refined polished": {"features": "joint", "refine": 3, "polish": 3, "rate": 0.003},
}

SOUPS: dict[str, dict[str, Any]] = {"greedy": {}, "tolerant": {"tolerance": 0.2}, "aligned": {"align": True}}
LEARNED: dict[str, dict[str, Any]] = {
    "learned_soup/{}": {"method": "learned_soup"},
    "learned_soup/{}/by tensor": {"method": "learned_soup", "by": "tensor", "weights": [1.0, 2.0, 1.0]},
    "adamerging/{}": {"method": "adamerging"},
    "adamerging/{}/entropy": {"method": "adamerging", "objective": "entropy", "by": "model"},
}
QUICK = {row: name for row, name in SEEN.items() if name in ("vit", "llama")}


def results() -> Results:
    """Two families."""
    yield from by_family(QUICK)


def others() -> Results:
    """The other families, and what one is enough for."""
    yield from by_family({row: name for row, name in SEEN.items() if row not in QUICK})
    yield from singles()


def by_family(rows: dict[str, str]) -> Results:
    yield from statistics(rows)
    yield from by_statistics(rows)
    yield from whole(rows)
    for row, name in rows.items():
        yield f"repair/{name}", lambda row=row: merged(row, repair=True)
        yield f"repair/{name}/aligned", lambda row=row: merged(row, repair=True, align=True)


def statistics(rows: dict[str, str]) -> Results:
    for row, name in rows.items():
        for what in ("gram", "activations", "units"):
            yield f"calibrate/{name}/{what}", lambda row=row, what=what: measured(row, what)
        yield f"calibrate/{name}/fisher true", lambda row=row: measured(row, "fisher")
        yield f"calibrate/{name}/fisher empirical", lambda row=row: measured(row, "fisher", fisher="empirical")
        yield f"calibrate/{name}/cross", lambda row=row: crossed(row)


def by_statistics(rows: dict[str, str]) -> Results:
    for row, name in rows.items():
        for align in (False, True):
            label = f"{name}/aligned" if align else name
            yield f"regmean/{label}", lambda r=row, a=align: each("regmean", r, align=a)
            yield f"fisher/{label}", lambda r=row, a=align: merged(r, method="fisher", align=a)
            yield (
                f"fisher/{label}/empirical",
                lambda r=row, a=align: merged(
                    r, method="fisher", align=a, calibrate={"fisher": "empirical"}, floor=1e-3
                ),
            )
        yield f"fisher/{name}/normalize", lambda r=row: merged(r, method="fisher", normalize=True, floor=1e-3)
        yield f"regmean/{name}/alpha 1", lambda r=row: each("regmean", r, alpha=1.0, weights=[2.0, 0.5])
        yield f"ewc/{name}", lambda r=row: with_base("ewc", r)
        yield f"elastic_weight_removal/{name}", lambda r=row: with_base("elastic_weight_removal", r)


def whole(rows: dict[str, str]) -> Results:
    for row, name in rows.items():
        for label, options in RECONSTRUCT.items():
            yield (
                f"reconstruct/{name}/{label}",
                lambda r=row, o=options: by_features(r, **o),
            )
        yield f"reconstruct/{name}/aligned", lambda r=row: by_features(r, align=True)
        yield f"regmean++/{name}", lambda r=row: each("regmean++", r)
        yield f"regmean++/{name}/aligned", lambda r=row: each("regmean++", r, align=True, off_diagonal=0.8)
        for options in FUSION if row == "vit-image" else FUSION[:4]:
            label = " ".join(f"{key}={value}" for key, value in options.items()) or "defaults"
            yield f"ot_fusion/{name}/{label}", lambda r=row, o=options: merged(r, method="ot_fusion", **o)
        yield f"ot_fusion/{name}/no data", lambda r=row: merged(r, method="ot_fusion", data=None, weights=[1, 3])
        if row in ("vit-image", "bert-token"):
            for label, options in SOUPS.items():
                yield f"greedy_soup/{name}/{label}", lambda r=row, o=options: soup(r, **o)
            yield f"swad/{name}", lambda r=row: of_run(r, method="swad", optimum=1, overfit=1)
            yield f"twa/{name}", lambda r=row: of_run(r, method="twa", steps=4)
            for label, options in LEARNED.items():
                yield label.format(name), lambda r=row, o=options: learned(r, **o)
            yield f"learned_soup/{name}/with a base", lambda r=row: learned(r, "learned_soup", base=model(r))
            yield f"adapter_soup/{name}", lambda r=row: similar(r)


def singles() -> Results:
    yield "repair/only", lambda: merged("vit-image", repair={"only": "attention"})
    yield "align/linear/mix", lambda: merged("vit-image", align={"evidence": "mix", "measure": "l2", "site": "pre"})
    yield "calibrate/samples", lambda: measured("llama-lm", "fisher", samples=3, seed=5)
    yield "calibrate/limit", lambda: measured("bert-token", "gram", limit=7)
    yield "calibrate/only", lambda: measured("gpt2-lm-untied", "gram", only="mlp")
    yield "calibrate/t5", lambda: measured_batches("t5-token")
    yield "calibrate/mixtral", lambda: measured_batches("mixtral-token")
    yield "regmean/only", lambda: each("regmean", "vit-image", calibrate={"only": "attention", "limit": 10})
    yield (
        "fisher/siblings aligned",
        lambda: settled(
            isomerge.merge(
                tuned("bert-token"), method="fisher", data=batches("bert-token"), align=True, threads=1
            ).state_dict()
        ),
    )
    yield "fisher/files", lambda: from_files("fisher", "importance", "fisher")
    yield "ewc/files", lambda: from_files("ewc", "importance", "fisher")
    yield "regmean/files", lambda: from_files("regmean", "statistics", "gram")
    yield "regmean/files aligned", lambda: from_files("regmean", "statistics", "gram", align=True)
    yield "ot_fusion/bert/across", lambda: merged("bert-token", method="ot_fusion", heads="across")
    yield (
        "ot_fusion/three",
        lambda: isomerge.merge(
            [model("vit-image", seed) for seed in range(3)], method="ot_fusion", weights=[1, 1, 2], threads=1
        ).state_dict(),
    )
    yield "ot_fusion/aligned", lambda: merged("vit-image", method="ot_fusion", align=True)
    for row, changes in WIDER.items():
        for place, label in ((0, "wider"), (1, "narrower")):
            for given in (False, True):
                how = "data" if given else "no data"
                yield f"ot_fusion/{row}/{label}/{how}", lambda r=row, c=changes, p=place, g=given: fused(r, c, p, g)
    yield "reconstruct/two data sets", lambda: each("reconstruct", "vit-image", goals="mean", features="mean")


def by_features(row: str, **options: Any) -> Any:
    return merged(row, method="reconstruct", goals="mean", **{"features": "mean", "start": "merge", **options})


def pair(row: str) -> list[str]:
    return [model(row, 0), model(row, 1)]


def merged(row: str, **options: Any) -> Any:
    """Two strangers on one data set."""
    given = {"data": batches(row), **options}
    found = isomerge.merge(pair(row), threads=1, **given).state_dict()
    return settled(found) if options.get("method") == "fisher" else found


def each(method: str, row: str, **options: Any) -> Any:
    """Each on data of its own."""
    data = [batches(row, seed) for seed in (0, 1)]
    return isomerge.merge(pair(row), method=method, data=data, threads=1, **options).state_dict()


def with_base(method: str, row: str) -> Any:
    given = {"base": model(row), "data": batches(row), "weights": [0.5, 0.25, 1.0]}
    return settled(isomerge.merge(tuned(row), method=method, threads=1, **given).state_dict())


def fused(row: str, changes: dict[str, Any], place: int, with_data: bool) -> Any:
    models = [model(row, 0), model(row, 1, changes=tuple(changes.items()))]
    data = without_labels(batches(row)) if with_data else None
    ordered = models if place == 0 else models[::-1]
    return isomerge.merge(ordered, method="ot_fusion", data=data, threads=1).state_dict()


def soup(row: str, **options: Any) -> dict[str, Any]:
    models = [*tuned(row, 3, spread=0.4), model(row, 1)]
    found = isomerge.merge(models, method="greedy_soup", data=batches(row, size=40), threads=1, **options)
    record = found.report()
    chosen = [models.index(name) for name in record["chosen"]]
    scores = [one["score"] for one in record["scores"]]
    return {"tensors": found.state_dict(), "score": record["score"], "scores": scores, "chosen": chosen}


def of_run(row: str, **options: Any) -> Any:
    models = tuned(row, 3, spread=0.4)
    return isomerge.merge(models, data=batches(row, size=40), threads=1, **options).state_dict()


def learned(row: str, method: str, **options: Any) -> Any:
    given = {"data": batches(row), **options}
    if method == "adamerging":
        given |= {"base": model(row), "data": [batches(row, seed) for seed in range(3)]}
    return isomerge.merge(tuned(row), method=method, steps=4, threads=1, **given).state_dict()


def similar(row: str) -> Any:
    data = [batches(row, seed) for seed in (0, 1, 2, 1)]
    how = {"method": "adapter_soup", "top": 2, "temperature": 0.1}
    return isomerge.merge(tuned(row), base=model(row), data=data, threads=1, **how).state_dict()


@cache
def statistics_file(row: str, what: str, seed: int = 0) -> str:
    path = scratch() / f"statistics-{row}-{what}-{seed}.safetensors"
    calibrate(model(row, seed), batches(row, seed), what={what}).save(path)
    return str(path)


def from_files(method: str, option: str, what: str, **options: Any) -> Any:
    files = [statistics_file("vit-image", what, seed) for seed in (0, 1)]
    found = isomerge.merge(pair("vit-image"), method=method, threads=1, **{option: files}, **options).state_dict()
    return settled(found) if what == "fisher" else found


def measured(row: str, what: str, **options: Any) -> dict[str, Any]:
    """As a file holds it: that is what other processes read."""
    path = scratch() / "measured.safetensors"
    calibrate(model(row), batches(row), what={what}, **options).save(path)
    return tensors_of(path)


def measured_batches(row: str) -> dict[str, Any]:
    path = scratch() / "measured.safetensors"
    calibrate(model(row), batches(row), what={"gram", "units"}).save(path)
    return tensors_of(path)


def crossed(row: str) -> dict[str, Any]:
    found = cross_statistics(model(row, 1), model(row, 0), lambda: iter(without_labels(batches(row))))
    return {name: [m.count, m.sum_b, m.sum_a, m.squares_b, m.squares_a, m.cross] for name, m in found.moments.items()}


def tensors_of(path: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)
