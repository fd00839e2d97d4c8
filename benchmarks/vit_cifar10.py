"""Two (or three) image classifiers trained from different seeds, merged: the table of every way to do it.

    python benchmarks/vit_cifar10.py --data cifar10-jpeg.tar.xz --work DIR --device cuda         # train, then merge
    python benchmarks/vit_cifar10.py --data cifar10-jpeg.tar.xz --work DIR --limit 1000 --pairs 0-1 --quick

Stock `ViTForImageClassification` of the founding paper's shape (7 layers, d = 384, 12 heads, patches of 4), trained on
CIFAR-10 from --seeds seeds and kept in --work. Rows: what is done with a pair. Columns: test accuracy of the merged
model, its test loss minus the mean of its parents, seconds. All pairs, mean and standard error. Data-driven rows
see training images and no labels (Fisher: labels drawn from the model). The seconds of a row that starts from aligned
models do not count the alignment, which is made once for all of them. Nothing is tuned on the test set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isomerge
from isomerge.data import open_data
from isomerge.evaluate.probe import load_stock

SHAPE = {"hidden_size": 384, "num_hidden_layers": 7, "num_attention_heads": 12, "intermediate_size": 1536,
         "image_size": 32, "patch_size": 4, "num_labels": 10, "hidden_dropout_prob": 0.0}  # fmt: skip
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True, "do_normalize": True,
    "rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": STD, "size": {"height": 32, "width": 32},
}  # fmt: skip
State = dict[str, Tensor]


# --- data and training ------------------------------------------------------------------------------------------------
def images(data: str, split: str, model: Path) -> tuple[Tensor, Tensor]:
    """Every image as the model wants it, and its label."""
    checkpoint = isomerge.open_checkpoint(model)
    batches = open_data(data, split=split).batches(checkpoint, batch_size=1000, labels=True)
    pairs = [(batch["pixel_values"].half(), batch["labels"]) for batch in batches]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def train(folder: Path, x: Tensor, y: Tensor, seed: int, epochs: int, device: str) -> None:
    """Random crops and flips, AdamW, warm-up and cosine, label smoothing; bfloat16 on an accelerator."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SHAPE)).to(device).train()
    x, y, size = x.to(device), y.to(device), 512
    steps = epochs * (len(x) // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 500) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    generator = torch.Generator(device=device).manual_seed(seed + 100)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), device=device, generator=generator).split(size):
            if len(chosen) < size:
                continue
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                logits = model(pixel_values=_augmented(x[chosen].float(), generator)).logits
            loss = torch.nn.functional.cross_entropy(logits.float(), y[chosen], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.float().cpu().save_pretrained(folder)


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    count, device = len(x), x.device
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    rows = torch.randint(0, 9, (count, 1), device=device, generator=generator) + torch.arange(32, device=device)
    columns = torch.randint(0, 9, (count, 1), device=device, generator=generator) + torch.arange(32, device=device)
    every, channel = torch.arange(count, device=device), torch.arange(3, device=device)
    cut = padded[
        every[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None]
    ]
    flip = torch.rand(count, device=device, generator=generator) < 0.5
    return torch.where(flip[:, None, None, None], cut.flip(3), cut)


# --- measuring --------------------------------------------------------------------------------------------------------
class Judge:
    """Accuracy and loss on the test images."""

    def __init__(self, config: dict[str, Any], x: Tensor, y: Tensor, device: str) -> None:
        self.config, self.x, self.y, self.device = config, x, y, device

    @torch.no_grad()
    def logits(self, state: State) -> Tensor:
        model = load_stock(self.config, state).float().to(self.device).eval()
        parts = [model(pixel_values=part.float().to(self.device)).logits.cpu() for part in self.x.split(500)]
        return torch.cat(parts)

    def score(self, logits: Tensor) -> tuple[float, float]:
        loss = torch.nn.functional.cross_entropy(logits, self.y)
        return float((logits.argmax(-1) == self.y).float().mean()), float(loss)


class Aligned:
    """Models next to the first of them, aligned once and kept on disk for every row that wants them."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._known: dict[tuple[Path, ...], list[Path]] = {}

    def __call__(self, models: list[Path]) -> list[Path]:
        key = tuple(models)
        if key not in self._known:
            found = [models[0]]
            for model in models[1:]:
                out = model.parent / f"{model.name}-next-to-{models[0].name}"
                if not (out / "config.json").exists():
                    isomerge.align(model, models[0], device=self.device).save(out)
                found.append(out)
            self._known[key] = found
        return self._known[key]


Make = Callable[[list[Path], Callable[[int], Any], str], State]


def rows(quick: bool, aligned: Aligned) -> dict[str, Make]:
    """Name of the row → what makes the merged weights from the models and the unlabelled batches."""

    def averaged(**options: Any) -> Make:
        def make(models: list[Path], batches: Callable[[int], Any], device: str) -> State:
            settings = dict(options)
            if count := settings.pop("images", None):
                settings |= {"data": batches(count)}
            states = [_state(models[0])]
            for model in models[1:]:
                moved = isomerge.align(model, models[0], device=device, **settings).state_dict() if options else None
                states.append(moved or _state(model))
            return isomerge.merge_state_dicts(states)

        return make

    def reconstructed(count: int, align: bool) -> Make:
        def make(models: list[Path], batches: Callable[[int], Any], device: str) -> State:
            from isomerge.merge.reconstruct import reconstruct

            chosen = aligned(models) if align else models
            return dict(reconstruct(chosen, batches(count), align=False, device=device).state_dict())

        return make

    def weighed(name: str, count: int, align: bool) -> Make:
        def make(models: list[Path], batches: Callable[[int], Any], device: str) -> State:
            from isomerge.merge.statistics import merge_fisher, merge_regmean

            merge = merge_fisher if name == "fisher" else merge_regmean
            return dict(merge(aligned(models) if align else models, batches(count), device=device))

        return make

    found = {
        "plain average": averaged(),
        "paper (rotation)": averaged(level="rotation"),
        "paper + scale": averaged(level="rotation", scale=True),
        "permutation": averaged(level="permutation"),
        "full, data-free": averaged(level="full"),
        "full, stream from 512 images": averaged(level="full", images=512),
        "RegMean, 2,000 images, not aligned": weighed("regmean", 2000, False),
        "RegMean, 2,000 images": weighed("regmean", 2000, True),
        "Fisher, 500 images, not aligned": weighed("fisher", 500, False),
        "Fisher, 500 images": weighed("fisher", 500, True),
    }
    for count in (500, 2000, 8000):
        found[f"reconstruct, {count:,} images, not aligned"] = reconstructed(count, False)
        found[f"reconstruct, {count:,} images"] = reconstructed(count, True)
    chosen = ("plain average", "paper (rotation)", "full, data-free", "reconstruct, 500 images")
    return {name: make for name, make in found.items() if not quick or name in chosen}


def _state(folder: Path) -> State:
    checkpoint = isomerge.open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="an archive or folder with train/<class> and test/<class>")
    parser.add_argument("--work", required=True, type=Path, help="models are kept here, one folder per seed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--limit", type=int, help="use that many test images")
    parser.add_argument("--pairs", help="as in 0-1,0-2; all if not named")
    parser.add_argument("--rows", help="only rows whose name contains one of these, with commas")
    parser.add_argument("--quick", action="store_true", help="four rows")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    folders = [given.work / str(seed) for seed in range(given.seeds)]
    for seed, folder in enumerate(folders):
        if not (folder / "config.json").exists():
            _prepare(folder)
            x, y = images(given.data, "train", folder)
            start = time.perf_counter()
            train(folder, x, y, seed, given.epochs, given.device)
            print(f"trained seed {seed} in {time.perf_counter() - start:.0f} s", flush=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    config = json.loads((folders[0] / "config.json").read_text())
    x, y = images(given.data, "test", folders[0])
    judge = Judge(config, x[: given.limit], y[: given.limit], given.device)
    pool, _ = images(given.data, "train", folders[0])
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))

    def batches(count: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        chosen = pool[order[:count]]
        return lambda: ({"pixel_values": part.float()} for part in chosen.split(250))

    record = measure(folders, judge, batches, given)
    print(table(record))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1))


def _prepare(folder: Path) -> None:
    """So that images can be read as the model to come will want them."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    transformers.ViTForImageClassification(transformers.ViTConfig(**SHAPE)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def measure(folders: list[Path], judge: Judge, batches: Callable[[int], Any], given: Any) -> dict[str, Any]:
    own = [judge.logits(_state(folder)) for folder in folders]
    parents = [judge.score(logits) for logits in own]
    pairs = list(itertools.combinations(range(len(folders)), 2))
    if given.pairs:
        pairs = [tuple(map(int, pair.split("-"))) for pair in given.pairs.split(",")]  # type: ignore[misc]
    groups = [*pairs, tuple(range(len(folders)))] if len(folders) > 2 and not given.pairs else pairs
    wanted = given.rows.split(",") if given.rows else None
    found: list[dict[str, Any]] = []
    every = rows(given.quick, Aligned(given.device))
    for group in groups:
        mean = [statistics.mean(parents[i][k] for i in group) for k in (0, 1)]
        together = torch.stack([own[i].softmax(-1) for i in group]).mean(0).log()
        accuracy, loss = judge.score(together)
        found.append(_row(group, "ensemble", accuracy, loss, mean, 0.0))
        for name, make in every.items():
            if (wanted and not any(part in name for part in wanted)) or (len(group) > 2 and "8,000 images" not in name):
                continue
            start = time.perf_counter()
            try:
                state = make([folders[i] for i in group], batches, given.device)
            except Exception as error:  # a row that fails is a result too
                print(f"{group} {name}: {type(error).__name__}: {error}", flush=True)
                continue
            seconds = time.perf_counter() - start
            accuracy, loss = judge.score(judge.logits(state))
            found.append(_row(group, name, accuracy, loss, mean, seconds))
            print(found[-1], flush=True)
    return {"parents": parents, "images": len(judge.y), "device": given.device, "rows": found}


def _row(group: Any, name: str, accuracy: float, loss: float, mean: list[float], seconds: float) -> dict[str, Any]:
    return {"models": list(group), "row": name, "accuracy": accuracy, "relative": accuracy / mean[0],
            "loss": loss, "barrier": loss - mean[1], "seconds": seconds}  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Markdown: mean ± standard error over the pairs, then all models at once."""
    lines = [
        "| merge | accuracy | of the parents' mean | loss above the parents' mean | seconds |",
        "|---|---|---|---|---|",
    ]
    for three in (False, True):
        some = [row for row in record["rows"] if (len(row["models"]) > 2) is three]
        for name in dict.fromkeys(row["row"] for row in some):
            own = [row for row in some if row["row"] == name]
            cells = [_mean([100 * r["accuracy"] for r in own], " %"), _mean([100 * r["relative"] for r in own], " %"),
                     _mean([r["barrier"] for r in own], "", 3), _mean([r["seconds"] for r in own], "")]  # fmt: skip
            label = f"{name}, {len(own[0]['models'])} models" if three else name
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    parents = ", ".join(f"{100 * accuracy:.1f} %" for accuracy, _ in record["parents"])
    return f"parents: {parents}; {record['images']} test images; {record['device']}\n\n" + "\n".join(lines)


def _mean(values: list[float], unit: str, digits: int = 1) -> str:
    spread = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}{unit}"


if __name__ == "__main__":
    main()
