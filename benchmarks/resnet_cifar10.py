"""ResNets from different seeds, merged: how the barrier falls with alignment, width and fresh batch statistics.

    python benchmarks/resnet_cifar10.py --data cifar10-jpeg.tar.xz --work DIR --widths 1 2 4
    python benchmarks/resnet_cifar10.py --tiny                 # scikit-learn's digits, a minute on a laptop

Stock `ResNetForImageClassification` of two basic stages, its widths multiplied, trained on some CIFAR-10 images from
two seeds. Each row is a way to merge the pair; each way costs one model. The control is one parent alone. `fresh
statistics` measures the batch norms again on the training images, without labels (as REPAIR and follow-ups of Git
Re-Basin do). The barrier is the test loss in the middle minus the mean of the parents' test losses. Nothing is tuned on
the test images.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import isomerge

CHANNELS = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
BATCH = 64
LEVELS = ("permutation", "full")
Data = tuple[Tensor, Tensor]


def cifar(path: Path, train: int, test: int) -> tuple[Data, Data]:
    """The first images of every class, as they lie in the archive."""
    from PIL import Image

    wanted, found = {"train": train // 10, "test": test // 10}, {"train": list[Any](), "test": list[Any]()}
    classes: list[str] = []
    counts: dict[tuple[str, str], int] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            split, _, rest = member.name.partition("/")
            if not member.isfile() or split not in wanted:
                continue
            label = rest.partition("/")[0]
            classes += [] if label in classes else [label]
            counts[split, label] = counts.get((split, label), 0) + 1
            if counts[split, label] <= wanted[split]:
                picture = Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGB")
                pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(32, 32, 3)
                found[split].append((pixels, classes.index(label)))
    mean, spread = (torch.tensor(values)[:, None, None] for values in CHANNELS)
    made = []
    for split in ("train", "test"):
        images = torch.stack([pixels.permute(2, 0, 1) for pixels, _ in found[split]]) / 255
        made.append(((images - mean) / spread, torch.tensor([label for _, label in found[split]])))
    return made[0], made[1]


def digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 8 - 1
    images = nn.functional.interpolate(images, size=32).expand(-1, 3, -1, -1).contiguous()
    labels = torch.tensor(loaded.target)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def train(data: Data, width: int, seed: int, epochs: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.ResNetConfig(
        embedding_size=16 * width, hidden_sizes=[16 * width, 32 * width], depths=[1, 1], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    model = transformers.ResNetForImageClassification(config)
    images, labels = data
    steps = epochs * (len(images) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
            seen = images[rows].flip(-1) if torch.rand(()) < 0.5 and len(images) > 1500 else images[rows]
            loss = nn.functional.cross_entropy(model(pixel_values=seen).logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def measured(model: Any, data: Data) -> dict[str, float]:
    images, labels = data
    logits = torch.cat([model(pixel_values=part).logits for part in images.split(500)])
    right = (logits.argmax(-1) == labels).double().mean()
    return {"accuracy": float(right), "loss": float(nn.functional.cross_entropy(logits, labels))}


@torch.no_grad()
def with_fresh_statistics(model: Any, images: Tensor) -> Any:
    """Batch norms measured again, as the mean over batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    for part in images.split(250):
        model(pixel_values=part)
    return model.eval()


def middle(first: Path, second: Path) -> Any:
    """The plain mean of two models, statistics included."""
    models = [transformers.ResNetForImageClassification.from_pretrained(path) for path in (first, second)]
    states = [model.state_dict() for model in models]
    mean = {n: (states[0][n] + states[1][n]) / 2 if t.is_floating_point() else t for n, t in states[0].items()}
    models[0].load_state_dict(mean)
    return models[0].eval()


def rows(work: Path, parents: list[Path], train_data: Data, test: Data) -> Iterator[tuple[str, dict[str, float]]]:
    ends = [measured(transformers.ResNetForImageClassification.from_pretrained(p).eval(), test) for p in parents]
    loss = sum(end["loss"] for end in ends) / 2
    yield (
        "one parent (mean of both)",
        {"accuracy": sum(end["accuracy"] for end in ends) / 2, "loss": loss, "barrier": 0.0},
    )
    ways = {"plain mean": parents[1]}
    for level in LEVELS:
        ways[f"aligned, {level}"] = work / f"aligned-{level}"
        isomerge.align(str(parents[1]), anchor=str(parents[0]), level=level).save(ways[f"aligned, {level}"], force=True)
    for name, second in ways.items():
        for fresh in (False, True):
            made = middle(parents[0], second)
            made = with_fresh_statistics(made, train_data[0]) if fresh else made
            found = measured(made, test)
            yield name + ", fresh statistics" * fresh, {**found, "barrier": found["loss"] - loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("resnet-work"))
    parser.add_argument("--widths", type=int, nargs="+", default=[1])
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=int, nargs=2, default=[5000, 2000], metavar=("TRAIN", "TEST"))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    train_data, test = digits() if asked.data is None or asked.tiny else cifar(asked.data, *asked.images)
    for width in asked.widths:
        parents = [asked.work / f"width{width}-seed{seed}" for seed in asked.seeds]
        for path, seed in zip(parents, asked.seeds, strict=True):
            if not path.exists():
                train(train_data, width, seed, asked.epochs).save_pretrained(path)
        for name, found in rows(asked.work / f"width{width}", parents, train_data, test):
            print(json.dumps({"width": width, "row": name, **{k: round(v, 4) for k, v in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
