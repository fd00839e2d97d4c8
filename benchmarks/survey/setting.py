"""What the benchmarks of the survey's families share: the models they merge, the data, and the table.

    class groups | trained from one base (`siblings`) | trained apart (`strangers`)

All are stock ViTs of width 64 on scikit-learn's digits, trained here in seconds, once for every seed. A benchmark is
a file beside this one with a function `rows(models, seed)` that yields measured rows; it ends with
`main(__doc__, rows)`:

    python benchmarks/survey/NAME.py [--seeds 3] [--out docs/results/survey]

It prints a table of means and standard errors over the seeds, and writes NAME.md and NAME.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fusing import circumstances, mean_and_error
from search import fit, rows_of

PARTS = {"train": slice(0, 697), "validation": slice(697, 1297), "test": slice(1297, 1797)}
Row = Mapping[str, Any]
"""`row`, the name of what was measured, and one number for each column."""


@dataclass(frozen=True)
class Models:
    """Folders of models of one seed, and the same images as files and as tensors."""

    folder: Path
    strangers: tuple[Path, ...]
    """Trained on the same images from different initialisations."""
    base: Path
    siblings: tuple[Path, ...]
    """Fine-tuned from `base`, each on other images of all classes."""
    pixels: dict[str, Tensor]
    labels: dict[str, Tensor]

    def data(self, split: str) -> dict[str, Any]:
        """What the verbs take as `data`."""
        return {"path": str(self.folder / "images"), "split": split}

    def accuracy(self, logits: Tensor, split: str = "test") -> float:
        """In percent."""
        return 100 * float((logits.argmax(-1) == self.labels[split]).double().mean())

    @torch.no_grad()
    def logits(self, model: Any, split: str = "test") -> Tensor:
        from transformers import ViTForImageClassification

        loaded = ViTForImageClassification.from_pretrained(model) if isinstance(model, (str, Path)) else model.eval()
        return loaded(self.pixels[split]).logits

    def score(self, model: Any, split: str = "test") -> dict[str, float]:
        """Accuracy in percent and loss in nats of a folder or module."""
        logits = self.logits(model, split)
        loss = float(torch.nn.functional.cross_entropy(logits.double(), self.labels[split]))
        return {"accuracy": self.accuracy(logits, split), "loss": loss}


def prepare(folder: Path, seed: int, *, strangers: int = 2, siblings: int = 3) -> Models:
    """Train and store everything of one seed."""
    from PIL import Image
    from sklearn.datasets import load_digits

    known = load_digits()
    images, targets = (known.images * 15).astype(np.uint8), torch.tensor(known.target)
    order = np.random.default_rng(seed).permutation(len(images))
    for split, part in PARTS.items():
        for number in order[part]:
            path = folder / "images" / split / str(int(targets[number])) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[number]).save(path)
    scaled = (torch.tensor(images).float()[:, None] / 255 - 0.5) / 0.5
    pixels = {split: scaled[torch.as_tensor(order[part])] for split, part in PARTS.items()}
    labels = {split: targets[torch.as_tensor(order[part])] for split, part in PARTS.items()}
    apart = [folder / f"stranger-{number}" for number in range(strangers)]
    for number, home in enumerate(apart):
        trained(new_model(100 * seed + number), pixels["train"], labels["train"], 40, 2e-3, seed, home)
    base = trained(new_model(100 * seed + 50), pixels["train"], labels["train"], 3, 2e-3, seed, folder / "base")
    experts = [folder / f"sibling-{number}" for number in range(siblings)]
    for number, home in enumerate(experts):
        own = slice(number, None, siblings)
        trained(loaded(base), pixels["train"][own], labels["train"][own], 10, 1e-3, seed + number, home)
    return Models(folder, tuple(apart), base, tuple(experts), pixels, labels)


def new_model(seed: int, **shape: Any) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    names = {str(label): label for label in range(10)}
    usual: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "label2id": names,
        "id2label": {label: name for name, label in names.items()},
    }  # fmt: skip
    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(**{**usual, **shape}))


def loaded(folder: Path) -> Any:
    from transformers import ViTForImageClassification

    return ViTForImageClassification.from_pretrained(folder)


def trained(
    model: Any, pixels: Tensor, labels: Tensor, epochs: int, rate: float, seed: int, home: Path
) -> Path:  # fmt: skip
    fit(model, rows_of({"pixel_values": pixels, "labels": labels}, 32), epochs, rate, seed).save_pretrained(home)
    return home


def main(
    description: str,
    rows: Callable[[Models, int], Iterable[Row]],
    columns: Sequence[tuple[str, int]] = (("accuracy", 1), ("loss", 3)),
    **prepared: int,
) -> None:
    """`columns`: the keys of a row that are shown, with the number of digits."""
    name = Path(sys.argv[0]).stem
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for the table and the record")
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    record: dict[str, Any] = {**circumstances("cpu"), "rows": []}
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as forgotten:
            for row in rows(prepare(Path(forgotten), seed, **prepared), seed):
                record["rows"].append({"seed": seed, **row})
                print(json.dumps(record["rows"][-1]), flush=True)
    text = table(record, columns)
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        title, _, about = description.partition("\n")
        page = f"# {title}\n\n{about.strip()}\n\n`python benchmarks/survey/{name}.py --seeds {given.seeds}`\n\n{text}\n"
        (given.out / f"{name}.md").write_text(page)


def table(record: Mapping[str, Any], columns: Sequence[tuple[str, int]]) -> str:
    lines = ["| | " + " | ".join(key for key, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row["row"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["row"] == name]
        cells = [mean_and_error([row.get(key) for row in own], digits) for key, digits in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seeds = len({row["seed"] for row in record["rows"]})
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date'][:10]}"
    return "\n".join([*lines, "", f"Means over {seeds} seeds, ± standard errors. {where}."])
