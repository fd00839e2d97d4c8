"""Image classifiers trained from different seeds, merged: the table of every way to do it.

    python benchmarks/vit_cifar10.py --data cifar10-jpeg.tar.xz --work DIR --device cuda --together   # train, merge
    python benchmarks/vit_cifar10.py --data cifar10-jpeg.tar.xz --work DIR --limit 1000 --pairs 0-1 --rows plain full
    python benchmarks/vit_cifar10.py --tiny                   # two CPU cores; without --data: scikit-learn's digits

Stock `ViTForImageClassification` of the founding paper's shape (7 layers, d = 384, 12 heads, patches of 4), trained on
CIFAR-10 from --seeds seeds and kept in --work. Rows: what is done with a pair. Columns: test accuracy of the merged
model, its test loss minus the mean of its parents, seconds of aligning and of merging. All pairs, mean and standard
error. Data-driven rows see training images and no labels (Fisher: labels drawn from the model). Nothing is tuned on the
test set.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fusing import BARRIER, SECONDS, Column, State, run, shared_arguments, standard_rows, train_all, trained
from torch import Tensor

import isomerge
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.data import open_data
from isomerge.running.stock import load_stock

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
COLUMNS = [
    Column("accuracy", lambda row: 100 * row["accuracy"], 1, " %"),
    Column("of the parents' mean", lambda row: 100 * row["accuracy"] / row["parents"]["accuracy"], 1, " %"),
    BARRIER,
    *SECONDS,
]


@dataclass(frozen=True)
class Plan:
    """The size of the models, how they are trained, and how many images the rows see."""

    shape: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 384, "num_hidden_layers": 7, "num_attention_heads": 12, "intermediate_size": 1536,
            "image_size": 32, "patch_size": 4, "num_channels": 3, "num_labels": 10,
        }
    )  # fmt: skip
    epochs: int = 60
    batch: int = 128
    warm_up: int = 2000
    rate: float = 3e-4
    decay: float = 0.1
    augment: bool = True
    images: int | None = None
    """Of each split; all if None."""
    stream: int = 512
    counts: tuple[int, ...] = (500, 2000, 8000)
    learn: tuple[int, ...] = (200, 1000)
    learn_from: int = 20_000


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TINY = Plan(
    {**Plan().shape, **SMALL, "patch_size": 8}, 40, 64, 50, 1e-3, 0.05, True, 2000, 256, (100, 400), (50,), 1000
)
DIGITS = Plan(
    {**Plan().shape, **SMALL, "image_size": 8, "num_channels": 1}, 40, 64, 50, 1e-3, 0.05, False, None, 256, (100, 400),
    (50,), 1000,
)  # fmt: skip


# --- data and training ------------------------------------------------------------------------------------------------
def new_model(plan: Plan) -> Any:
    import transformers

    return transformers.ViTForImageClassification(transformers.ViTConfig(**plan.shape, hidden_dropout_prob=0.0))


def read_images(data: str | None, plan: Plan) -> dict[str, tuple[Tensor, Tensor]]:
    """Images as the models want them, and their labels, of "train" and "test"."""
    if data is None:
        from isomerge.demonstration.digits import load_digits

        digits = load_digits()
        return {
            "train": (digits.train_images, digits.train_labels),
            "test": (digits.test_images, digits.test_labels),
        }
    with tempfile.TemporaryDirectory() as folder:  # an untrained model, which says how images are prepared
        save(Path(folder), new_model(plan), {})
        checkpoint = isomerge.open_checkpoint(folder)
        found = {}
        for split in ("train", "test"):
            opened = open_data(data, split=split)
            batches = list(opened.batches(checkpoint, batch_size=1000, limit=plan.images, labels=True))
            pixels = torch.cat([batch["pixel_values"].half() for batch in batches])
            found[split] = (pixels, torch.cat([batch["labels"] for batch in batches]))
    return found


def train(folder: Path, plan: Plan, x: Tensor, y: Tensor, seed: int, device: str) -> None:
    """Random crops and flips, AdamW, warm-up and cosine, label smoothing.

    On a GPU a bfloat16 copy runs and the float32 weights learn: half the time of autocast, which keeps every norm and
    the stream between layers in float32.
    """
    torch.manual_seed(seed)
    start = time.perf_counter()
    model = new_model(plan).to(device).train()
    runner = copy.deepcopy(model).bfloat16() if torch.device(device).type == "cuda" else model
    learning, running = list(model.parameters()), list(runner.parameters())
    if runner is not model:
        for parameter in learning:
            parameter.grad = torch.empty_like(parameter)
    x, y = x.to(device), y.to(device)
    steps = plan.epochs * (len(x) // plan.batch)
    decay = [{"params": [p for p in learning if p.ndim > 1], "weight_decay": plan.decay},
             {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(decay, lr=plan.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / plan.warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    generator = torch.Generator(device=device).manual_seed(seed + 100)
    for _ in range(plan.epochs):
        for chosen in torch.randperm(len(x), device=device, generator=generator).split(plan.batch):
            if len(chosen) < plan.batch:
                continue
            pixels = _augmented(x[chosen], generator) if plan.augment else x[chosen]
            logits = runner(pixel_values=pixels.to(running[0].dtype)).logits
            loss = torch.nn.functional.cross_entropy(logits.float(), y[chosen], label_smoothing=0.1)
            runner.zero_grad(set_to_none=True)
            loss.backward()
            if runner is not model:
                torch._foreach_copy_([p.grad for p in learning], [p.grad for p in running])
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            schedule.step()
            if runner is not model:
                torch._foreach_copy_([p.data for p in running], [p.data for p in learning])
    seconds = time.perf_counter() - start
    print(f"trained seed {seed} in {seconds:.0f} s", flush=True)
    save(folder, model, {**asdict(plan), "seconds": seconds, "device": device})


def save(folder: Path, model: Any, training: dict[str, Any]) -> None:
    """A stock folder; the weights last, since they say that it is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.json").write_text(json.dumps(training))
    if model.config.num_channels == 3:
        size = model.config.image_size
        prepared = {
            "image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True, "do_normalize": True,
            "rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": STD, "size": {"height": size, "width": size},
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    with quiet_transformers():
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
def judge_on(
    config: dict[str, Any], x: Tensor, y: Tensor, device: str
) -> Callable[[Sequence[State]], dict[str, float]]:
    @torch.no_grad()
    def judge(states: Sequence[State]) -> dict[str, float]:
        models = [load_stock(config, state).to(device) for state in states]
        parts = []
        for pixels in x.split(500):
            pixels = pixels.float().to(device)
            scores = torch.stack([model(pixel_values=pixels).logits.log_softmax(-1) for model in models])
            parts.append((scores.logsumexp(0) - math.log(len(models))).cpu())
        scores = torch.cat(parts)
        loss = torch.nn.functional.nll_loss(scores, y)
        return {"accuracy": float((scores.argmax(-1) == y).float().mean()), "loss": float(loss)}

    return judge


def calibration(x: Tensor) -> Callable[[int], Callable[[], Iterator[dict[str, Tensor]]]]:
    """Training images in an order drawn once."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))

    def batches(count: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        if count > len(x):
            raise ValueError(f"{count:,} images were asked for, and there are {len(x):,} to train on")
        chosen = x[order[:count]]
        return lambda: ({"pixel_values": part.float()} for part in chosen.split(250))

    return batches


def arguments() -> argparse.Namespace:
    parser = shared_arguments(__doc__.split("\n")[0])
    parser.add_argument("--data", help="an archive or folder with train/<class> and test/<class>")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--learn", type=int, nargs="+", help="steps that an alignment learns (200 1000; --tiny: 50)")
    given = parser.parse_args()
    if not given.tiny and (given.data is None or given.work is None):
        parser.error("--data and --work are needed, unless --tiny is given")
    return given


def main() -> None:
    given = arguments()
    plan = Plan() if not given.tiny else TINY if given.data else DIGITS
    plan = replace(plan, epochs=given.epochs or plan.epochs)
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        given.work.mkdir(parents=True, exist_ok=True)
        benchmark(given, plan)


def benchmark(given: argparse.Namespace, plan: Plan) -> None:
    home = given.work / ("tiny" if given.data else "digits") if given.tiny else given.work
    folders = [home / str(seed) for seed in range(given.seeds or (2 if given.tiny else 3))]
    images = read_images(given.data, plan)
    missing = [(seed, folder) for seed, folder in enumerate(folders) if not (folder / "model.safetensors").exists()]
    jobs = [(folder, plan, *images["train"], seed, given.device) for seed, folder in missing]
    train_all(train, jobs, given.together)
    if given.train_only:
        return
    config = json.loads((folders[0] / "config.json").read_text())
    x, y = (part[: given.limit] for part in images["test"])
    rows = standard_rows(
        "images", stream=plan.stream, counts=plan.counts, all_at_once=8000, start={"level": "full"}, cache=given.cache,
        learn=given.learn or plan.learn, learn_from=plan.learn_from,
    )  # fmt: skip
    about = {"benchmark": "vit_cifar10", "tiny": given.tiny, "data": str(given.data or "digits"), "test_images": len(y),
             "training": trained(folders)}  # fmt: skip
    run(folders, rows, judge_on(config, x, y, given.device), calibration(images["train"][0]), COLUMNS, given, about)


if __name__ == "__main__":
    main()
