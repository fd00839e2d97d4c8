"""Search beside a grid of four times as many evaluations, beside random numbers, and beside the models alone.

    python benchmarks/search.py                       # two CPU cores, minutes, no data needed
    python benchmarks/search.py --seeds 1 --tasks digits --json record.json

Two tasks, each with models trained here, once for every seed. Digits: a stock ViT of width 64 on scikit-learn's digits,
and three copies, each trained on with other images; three weights of task arithmetic. Texts: a stock
Llama of width 64 on the manual pages that Python brings along and the source text of its library, and two copies that
were trained on with one of them; weights of task arithmetic that change from the first layer to the last, four numbers.
The grid takes 4 values of each weight (64 merges), for the texts 3 (81 merges); every search takes a quarter of these
between the same bounds. What is chosen is chosen on validation data; the test part is measured once for each row.
The texts start from a point of the grid, so that no search is given a value that the grid lacks.
Columns: mean and standard error over the seeds of the loss on both, in nats, and in how many seeds the loss is below
that of the grid.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fusing import circumstances, mean_and_error
from lm_wikitext2 import PLANS, encoded, open_tokenizer, read_texts, sequences
from lm_wikitext2 import TINY as TINY_TEXT
from lm_wikitext2 import new_model as new_llama
from skills import library
from torch import Tensor

import isomerge

ALGORITHMS = ("random", "cma", "bayesian")
Batches = Iterator[dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """Models to merge, the weights to choose, and the two parts of the data."""

    recipe: dict[str, Any]
    weights: list[str]
    values: list[float]
    """Of each weight, in the grid."""
    data: dict[str, Any]
    test: dict[str, Any]


# --- training ---------------------------------------------------------------------------------------------------------
def fit(model: Any, batches: Callable[[torch.Generator], Batches], epochs: int, rate: float, seed: int) -> Any:
    """AdamW with a rate that falls along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * sum(1 for _ in batches(torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for batch in batches(generator):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def rows_of(tensors: Mapping[str, Tensor], size: int) -> Callable[[torch.Generator], Batches]:
    count = len(next(iter(tensors.values())))

    def batches(generator: torch.Generator) -> Batches:
        for chosen in torch.randperm(count, generator=generator).split(size):
            yield {name: tensor[chosen] for name, tensor in tensors.items()}

    return batches


# --- tasks ------------------------------------------------------------------------------------------------------------
IMAGES = (400, 200, 97)
"""How many each of the copies is trained on: some parents know more than others."""


def digits(folder: Path, seed: int) -> Task:
    """Parts of 697, 600 and 500 images; the models read pixels from −1 to 1."""
    from PIL import Image
    from sklearn.datasets import load_digits
    from transformers import ViTConfig, ViTForImageClassification

    known = load_digits()
    images, labels = (known.images * 15).astype(np.uint8), torch.tensor(known.target)
    order = np.random.default_rng(seed).permutation(len(images))
    for split, part in {"validation": order[697:1297], "test": order[1297:]}.items():
        for number in part:
            path = folder / "images" / split / str(int(labels[number])) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[number]).save(path)
    train = torch.as_tensor(order[:697])
    pixels = (torch.tensor(images).float()[:, None] / 255 - 0.5) / 0.5
    torch.manual_seed(seed)
    names = {str(label): label for label in range(10)}
    base = ViTForImageClassification(ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, label2id=names, id2label={label: name for name, label in names.items()},
    ))  # fmt: skip

    def on(part: Tensor) -> Callable[[torch.Generator], Batches]:
        return rows_of({"pixel_values": pixels[part], "labels": labels[part]}, 32)

    fit(base, on(train), 3, 2e-3, seed).save_pretrained(folder / "base")
    for number, part in enumerate(train.split(IMAGES)):
        expert = ViTForImageClassification.from_pretrained(folder / "base")
        fit(expert, on(part), 10, 1e-3, seed + number).save_pretrained(folder / f"expert-{number}")
    weights = [f"models[{number}].weight" for number in range(3)]
    models = [{"model": str(folder / f"expert-{number}"), "parameters": {"weight": 0.6}} for number in range(3)]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "models": models}
    parts = ({"path": str(folder / "images"), "split": split} for split in ("validation", "test"))
    return Task(recipe, weights, [0.0, 1 / 3, 2 / 3, 1.0], *parts)


TRAINED = 150_000
"""Characters of each text."""


def texts(folder: Path, seed: int) -> Task:
    """Both texts in validation and test data, 160 sequences of 64 tokens of each part."""
    import transformers

    plan = PLANS["llama"].__class__(**{**vars(PLANS["llama"]), **TINY_TEXT, "dropout": 0.0})
    sources = {"manual": read_texts(None, True), "library": interleaved(library(500_000))}
    tokenizer = open_tokenizer(
        folder / "tokenizer.json", "".join(s["train"] for s in sources.values()), plan.vocabulary
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>")
    rows = {
        name: sequences(encoded(tokenizer, source["train"][:TRAINED]), plan.context) for name, source in sources.items()
    }
    for split in ("valid", "test"):
        both = "\n".join(source[split][:40_000] for source in sources.values())
        (folder / f"{split}.txt").write_text(both, encoding="utf-8")
    torch.manual_seed(seed)
    base = new_llama(plan, tokenizer.get_vocab_size())

    def on(ids: Tensor) -> Callable[[torch.Generator], Batches]:
        return rows_of({"input_ids": ids, "labels": ids}, plan.batch)

    fit(base, on(torch.cat(list(rows.values()))), 2, 3e-3, seed).save_pretrained(folder / "base")
    fast.save_pretrained(folder / "base")
    for name, ids in rows.items():
        expert = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
        fit(expert, on(ids), 3, 1e-3, seed).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    models = [{"model": str(folder / name), "parameters": {"weight": [0.5, 0.5]}} for name in rows]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "models": models}
    weights = [f"models[{model}].parameters.weight[{place}]" for model in (0, 1) for place in (0, 1)]
    parts = ({"path": str(folder / f"{split}.txt"), "kind": "corpus", "limit": 160} for split in ("valid", "test"))
    return Task(recipe, weights, [0.0, 0.5, 1.0], *parts)


def interleaved(text: str, piece: int = 2000) -> dict[str, str]:
    """Pieces in turn, so that all parts are of one kind."""
    pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
    places = {"train": range(6), "valid": (6, 7), "test": (8, 9)}
    return {split: "".join(p for n, p in enumerate(pieces) if n % 10 in own) for split, own in places.items()}


TASKS = {"digits": digits, "texts": texts}


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(task: Task, seed: int) -> Iterator[dict[str, Any]]:
    count = len(task.values) ** len(task.weights)
    start = time.perf_counter()
    over = {name: task.values for name in task.weights}
    # The seed draws the examples: the grid is measured on those that the searches are.
    grid = isomerge.sweep(task.recipe, over, data=task.data, test=task.test, seed=seed)
    assert grid.test is not None
    yield row("grid", count, grid.best.loss, grid.test.best["loss"], time.perf_counter() - start)
    bounds = {name: f"{task.values[0]}:{task.values[-1]}" for name in task.weights}
    for algorithm in ALGORITHMS:
        start = time.perf_counter()
        found = isomerge.search(
            task.recipe, bounds, data=task.data, test=task.test, evaluations=count // 4, algorithm=algorithm, seed=seed
        )
        assert found.test is not None and found.start is not None
        seconds = time.perf_counter() - start
        yield row(algorithm, count // 4, found.best.loss, found.test.best["loss"], seconds, says=found.says)
    yield row("unchanged recipe", 1, found.start.loss, found.test.start["loss"], None)
    for one, tested in zip(found.controls or (), found.test.controls or (), strict=True):
        yield row(f"{one.role}: {Path(one.name).name}", 1, one.loss, tested.loss, None)


def row(name: str, evaluations: int, loss: Any, test: Any, seconds: float | None, **more: Any) -> dict[str, Any]:
    return {"row": name, "evaluations": evaluations, "loss": loss, "test": test, "seconds": seconds, **more}


def table(record: Mapping[str, Any]) -> str:
    lines = []
    for task in dict.fromkeys(row["task"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["task"] == task]
        grid = {row["seed"]: row for row in rows if row["row"] == "grid"}
        lines += ["", f"| {task} | evaluations | validation loss | test loss | below the grid | test | seconds |"]
        lines += ["|---" * 7 + "|"]
        for name in dict.fromkeys(row["row"] for row in rows):
            own = [row for row in rows if row["row"] == name]
            below = [sum(row[key] < grid[row["seed"]][key] for row in own) for key in ("loss", "test")]
            won = ["–" if name == "grid" else f"{count} of {len(own)}" for count in below]
            numbers = [mean_and_error([row[key] for row in own], 4) for key in ("loss", "test")]
            seconds = mean_and_error([row["seconds"] for row in own], 0)
            lines.append("| " + " | ".join([name, str(own[0]["evaluations"]), *numbers, *won, seconds]) + " |")
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return f"{where}\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--json", type=Path, help="the record, written after every row")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {**circumstances("cpu"), "rows": []}
    with tempfile.TemporaryDirectory() as forgotten:
        for name in given.tasks:
            for seed in range(given.seeds):
                task = TASKS[name](Path(forgotten, name, str(seed)), seed)
                for measured in measure(task, seed):
                    record["rows"].append({"task": name, "seed": seed, **measured})
                    print(json.dumps(record["rows"][-1]), flush=True)
                    if given.json:
                        given.json.write_text(json.dumps(record, indent=1))
    print(table(record))


if __name__ == "__main__":
    main()
