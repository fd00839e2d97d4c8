"""Does a ranking of models say which will be useful? Kendall's τ between `isomerge.find` and what models then reach.

    python benchmarks/zoo_ranking.py --json record.json            # minutes on one core; needs scikit-learn alone
    python benchmarks/zoo_ranking.py --models 8 --queries 2        # a quick look

The zoo: stock ViTs on handwritten digits, fine-tuned from one base on 400 images each. Every model has its own classes
(2 to 10 of them), its own view (plain, negative, turned by 90°, noisy) and its own number of epochs. The queries are
other images: some classes in some view, 100 to rank by and the rest to test on. What is true of a model is its accuracy
on the test part as it is, and that of a linear probe: a ridge regression on the features before the head, solved on the
100 images. The rankings see the 100 images and the descriptions; "norm" is the distance of the weights from the base,
which sees nothing of the query. τ is averaged over the queries; the interval is the bootstrap's over models (95 %).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.stats import kendalltau

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.data import open_data
from isomerge.demonstration import digits as task
from isomerge.zoo.answers import answers_of

SEEN, IMAGES, DRAWS = 100, 400, 1000
VIEWS = ("plain", "negative", "turned", "noisy")
QUERIES = [
    ("plain", range(5)), ("plain", range(5, 10)), ("negative", range(10)), ("turned", range(10)),
    ("noisy", range(3, 8)), ("turned", (0, 1, 4, 7)),
]  # fmt: skip
RANKINGS = ("distance", "leep", "logme", "certainty", "accuracy on the 100", "norm")
MERGED = 3


def viewed(images: np.ndarray, view: str, random: np.random.Generator) -> np.ndarray:
    """uint8 (n, 8, 8) as this view shows them."""
    if view == "negative":
        return 240 - images
    if view == "turned":
        return np.rot90(images, axes=(1, 2)).copy()
    if view == "noisy":
        return (images.astype(float) + random.normal(0, 60, images.shape)).clip(0, 240).astype(np.uint8)
    return images


def written(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:04}.png")


def as_model_reads(images: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(images).float()[:, None] / 240 - 0.3) / 0.37


def trained(model: Any, images: np.ndarray, labels: np.ndarray, seed: int, epochs: int) -> Any:
    """The digits code's own training, on these images drawn again and again."""
    drawn = np.random.default_rng(seed).integers(0, len(images), task.TRAIN)
    seen, named = as_model_reads(images[drawn]), torch.from_numpy(labels[drawn])
    return task.train(model, seed, task.Digits(seen, named, seen[:1], named[:1]), epochs=epochs)


def saved(model: Any, folder: Path) -> None:
    model.config.id2label = {n: str(n) for n in range(10)}
    model.config.label2id = {str(n): n for n in range(10)}
    with quiet_transformers():
        model.save_pretrained(folder)
    settings = {"do_resize": False, "rescale_factor": 1 / 240, "image_mean": [0.3], "image_std": [0.37],
                "size": {"height": 8, "width": 8}}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "do_rescale": True, "do_normalize": True}))


def make_zoo(work: Path, count: int, images: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    base = trained(task.new_model(0), images[:IMAGES], labels[:IMAGES], 0, 3)
    saved(base, work / "base")
    told = []
    for number in range(count):
        random = np.random.default_rng(100 + number)
        classes = np.sort(random.permutation(10)[: random.integers(2, 11)])
        view, epochs = VIEWS[number % len(VIEWS)], int(random.integers(1, 9))
        mine = random.permutation(np.flatnonzero(np.isin(labels, classes)))[:IMAGES]
        seen = viewed(images[mine], view, random)
        model = task.new_model(0)
        model.load_state_dict(base.state_dict())
        folder = work / "zoo" / f"{number:02}"
        saved(trained(model, seen, labels[mine], number, epochs), folder)
        written(work / "seen" / f"{number:02}", seen, labels[mine])
        isomerge.describe(folder, work / "seen" / f"{number:02}", score=False)
        told.append({"view": view, "classes": classes.tolist(), "epochs": epochs})
    return told


def norm_from(base: Path, model: Path) -> float:
    first, other = open_checkpoint(base), open_checkpoint(model)
    return float(sum((other.read(n).double() - first.read(n).double()).square().sum() for n in first.tensors)) ** 0.5


def probed(folder: Path, seen: Path, test: Path) -> float:
    """Accuracy of a ridge regression on the features before the head."""
    rows, labels = [], []
    for path in (seen, test):
        data = open_data(path)
        features = answers_of(open_checkpoint(folder), data, data.size, 0, "cpu").features
        assert features is not None
        rows.append(np.hstack([features, np.ones((len(features), 1))]))
        labels.append(np.array([one.label for one in data.contents()]))
    classes = np.unique(labels[0])
    targets = (labels[0][:, None] == classes).astype(float)
    solved = np.linalg.solve(rows[0].T @ rows[0] + np.eye(rows[0].shape[1]), rows[0].T @ targets)
    return float((classes[(rows[1] @ solved).argmax(1)] == labels[1]).mean())


def measured(work: Path, query: Path, models: list[Path], random: np.random.Generator) -> dict[str, Any]:
    seen, test = query / "seen", query / "test"
    found = {one.name: one for one in isomerge.find(seen, work / "zoo", by="leep").models}
    rankings: dict[str, list[float]] = {name: [] for name in RANKINGS}
    truth: dict[str, list[float]] = {"accuracy": [], "probe": []}
    for model in models:
        row = found[str(model)]
        for name in ("leep", "logme", "certainty"):
            rankings[name].append(float(getattr(row, name)))
        rankings["distance"].append(-float(row.distance or 0))
        rankings["norm"].append(-norm_from(work / "base", model))
        rankings["accuracy on the 100"].append(float(isomerge.evaluate(str(model), seen).metric or 0))
        truth["accuracy"].append(float(isomerge.evaluate(str(model), test).metric or 0))
        truth["probe"].append(probed(model, seen, test))
    merges = {}
    for name, values in {**rankings, "drawn": random.random(len(models)).tolist()}.items():
        chosen = [str(models[k]) for k in np.argsort(values)[::-1][:MERGED]]
        isomerge.merge(chosen).save(work / "merged", force=True, report=False)
        merges[name] = float(isomerge.evaluate(str(work / "merged"), test).metric or 0)
    return {"rankings": rankings, "truth": truth, "merged": merges}


def tau_of(records: list[dict[str, Any]], ranking: str, truth: str, chosen: np.ndarray) -> float:
    found = []
    for one in records:
        tau = kendalltau(np.array(one["rankings"][ranking])[chosen], np.array(one["truth"][truth])[chosen]).statistic
        found.append(0.0 if np.isnan(tau) else float(tau))
    return float(np.mean(found))


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = len(records[0]["truth"]["accuracy"])
    random = np.random.default_rng(0)
    draws = [random.integers(0, count, count) for _ in range(DRAWS)]
    rows = []
    for ranking in RANKINGS:
        row: dict[str, Any] = {"ranking": ranking}
        for truth in ("accuracy", "probe"):
            low, high = np.percentile([tau_of(records, ranking, truth, one) for one in draws], [2.5, 97.5])
            row[truth] = [tau_of(records, ranking, truth, np.arange(count)), float(low), float(high)]
            row[f"first, {truth}"] = mean_over(records, lambda one, r=ranking, t=truth: one["truth"][t][
                int(np.argmax(one["rankings"][r]))])  # fmt: skip
        row["merged"] = mean_over(records, lambda one, r=ranking: one["merged"][r])
        rows.append(row)
    return rows


def mean_over(records: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    return float(np.mean([value(one) for one in records]))


def table(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    head = ("ranked by", "τ with accuracy", "τ with the probe", "the first: accuracy; probe", "the first three, merged")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        taus = ["{:.2f} [{:.2f}, {:.2f}]".format(*row[truth]) for truth in ("accuracy", "probe")]
        firsts = f"{row['first, accuracy']:.1%}; {row['first, probe']:.1%}"
        lines.append(f"| {row['ranking']} | {taus[0]} | {taus[1]} | {firsts} | {row['merged']:.1%} |")
    best = [mean_over(records, lambda one, t=t: max(one["truth"][t])) for t in ("accuracy", "probe")]
    mean = [mean_over(records, lambda one, t=t: float(np.mean(one["truth"][t]))) for t in ("accuracy", "probe")]
    drawn = mean_over(records, lambda one: one["merged"]["drawn"])
    lines.append(f"| the best there is | 1 | 1 | {best[0]:.1%}; {best[1]:.1%} | |")
    lines.append(f"| drawn by lot | 0 | 0 | {mean[0]:.1%}; {mean[1]:.1%} | {drawn:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=32)
    parser.add_argument("--queries", type=int, default=len(QUERIES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    from sklearn import datasets

    data = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = (data.images[order] * 15).astype(np.uint8), data.target[order]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        told = make_zoo(work, given.models, images[: task.TRAIN], labels[: task.TRAIN])
        models = sorted((work / "zoo").iterdir())
        print(f"{len(models)} models after {time.perf_counter() - start:.0f} s", flush=True)
        records = []
        for number, (view, classes) in enumerate(QUERIES[: given.queries]):
            random = np.random.default_rng(number)
            fresh = task.TRAIN + np.flatnonzero(np.isin(labels[task.TRAIN :], list(classes)))
            query, shown = work / f"query-{number}", viewed(images[fresh], view, random)
            written(query / "seen", shown[:SEEN], labels[fresh][:SEEN])
            written(query / "test", shown[SEEN:], labels[fresh][SEEN:])
            records.append({"view": view, "classes": list(classes)} | measured(work, query, models, random))
            print(f"query {number} after {time.perf_counter() - start:.0f} s", flush=True)
    rows = summary(records)
    print(table(rows, records))
    if given.json:
        given.json.write_text(json.dumps({"zoo": told, "queries": records, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
