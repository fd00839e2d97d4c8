"""What the language experiments share: base models, fine-tuning, judging, and models as states with a head each.

A base is named as on the hub; with `--models DIR` it is the folder DIR/<last part of that name>. Fine-tuned models are
kept under `--work` and used again. All models of a seed begin with the same head, so that heads can be averaged where
no model of the task exists.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from corpora import CORPORA, LABELS
from encoding import IGNORED, Inputs, load_tokenizer
from runner import Run
from torch import Tensor

State = dict[str, Tensor]
BASES = {
    "reduced": ("sentence-transformers/all-MiniLM-L6-v2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "small": ("sentence-transformers/all-MiniLM-L6-v2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "original": ("FacebookAI/roberta-base", "microsoft/deberta-v3-large"),
}


@dataclass(frozen=True)
class Plan:
    """How models are trained, tested and measured."""

    epochs: int
    batch: int
    rate: float
    examples: int | None
    """Of a training set, at most."""
    least_steps: int
    """Sets too small for so many steps in these epochs are gone through more often."""
    tested: int | None
    """Examples of a test set, at most."""
    grams: int
    """Training examples that RegMean sees of each model's set."""
    informed: int
    """Training examples that Fisher sees of each model's set."""
    warm_up: float = 0.06
    length: int = 128
    layers: int | None = None
    """The first layers of the base that are kept, if not all."""
    bfloat16: bool = False
    """Forward and backward passes of training, on a GPU."""
    by_length: bool = True
    """Whether batches of training have texts of like lengths."""


PLANS = {
    "reduced": Plan(2, 16, 3e-4, 128, 0, 64, 48, 12, length=48),
    "small": Plan(3, 64, 1e-4, 4000, 150, 1000, 512, 256),
    "original": Plan(20, 16, 1e-5, None, 0, None, 1000, 1000, length=256, by_length=False),
}


OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("reduced", "HuggingFaceTB/SmolLM2-135M-Instruct"): {"rate": 1e-4, "layers": 6},
    ("small", "HuggingFaceTB/SmolLM2-135M-Instruct"): {"bfloat16": True, "rate": 1e-4},
}
"""What is different for one base."""
SEEDS = {("small", "HuggingFaceTB/SmolLM2-135M-Instruct"): 2}
"""Of models that take long, Table 1 has no more."""


def plan_for(scale: str, base: str) -> Plan:
    return replace(PLANS[scale], **OWN.get((scale, base), {}))


def seeds_for(run: Run, base: str) -> int:
    return min(run.seeds, SEEDS.get((run.scale, base), run.seeds))


# --- base models ------------------------------------------------------------------------------------------------------
def bases_of(run: Run) -> tuple[str, ...]:
    """The names that --bases gives, or the scale's; the larger last."""
    return run.bases or BASES[run.scale]


def title(base: str) -> str:
    return base.rpartition("/")[2]


def origin(path: str) -> str | None:
    """What NOTE.txt beside a base says of it: where it is from, if it is not the one that its name says."""
    note = Path(path) / "NOTE.txt"
    return f"{title(path)}: {note.read_text().strip()}" if note.is_file() else None


def base_path(base: str, models: Path | None) -> str:
    """Where a base is loaded from: a folder under --models, or the hub."""
    if models is None:
        return base
    folder = models / title(base)
    config, wrong = folder / "config.json", ""
    if not config.is_file():
        wrong = f"{folder} holds no config.json"
    elif "model_type" not in json.loads(config.read_text()):  # one of a pooling layer, say
        wrong = f"{config} is not that of a model, as it names no model_type"
    if wrong:
        raise SystemExit(
            f"Loading {base}: {wrong}. Put the model there as save_pretrained writes it, with its tokenizer, or leave "
            "--models out to take it from the hub."
        )
    return str(folder)


# --- fine-tuning ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """One model to fine-tune: what it takes, and the folder that tells it from all others."""

    base: str
    corpus: str
    seed: int
    plan: Plan
    data: Path | None
    work: Path
    device: str

    @property
    def folder(self) -> Path:
        plan = {key: value for key, value in asdict(self.plan).items() if key not in ("tested", "grams", "informed")}
        about = json.dumps([title(self.base), plan, torch.device(self.device).type], sort_keys=True)
        mark = hashlib.sha256(about.encode()).hexdigest()[:8]
        return self.work / "language" / f"{title(self.base)}-{mark}" / f"{self.corpus}-{self.seed}"

    @property
    def done(self) -> bool:
        return (self.folder / "training.json").is_file()


def new_model(base: str, task: str, seed: int, layers: int | None = None) -> Any:
    """The base (or its first layers) with a new head: weights are drawn by the seed, biases are zero."""
    import transformers

    from isomerge.checkpoint.memory import quiet_transformers

    labels = LABELS[task]
    kind = "AutoModelForTokenClassification" if task == "ner" else "AutoModelForSequenceClassification"
    names: dict[str, Any] = {"num_labels": len(labels) or 1}
    if labels:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    if layers:
        names["num_hidden_layers"] = layers
    with quiet_transformers():
        model = getattr(transformers, kind).from_pretrained(
            base, dtype=torch.float32, ignore_mismatched_sizes=True, **names
        )
    model.config.pad_token_id = load_tokenizer(base).pad_token_id  # by it, the last token of a text is found
    generator = torch.Generator().manual_seed(seed)
    parameters = model.state_dict()
    for name in head_names(model):
        values = parameters[name]
        drawn = torch.randn(values.shape, generator=generator) * model.config.initializer_range
        values.copy_(drawn if values.dim() > 1 else torch.zeros_like(values))
    return model


def head_names(model: Any) -> list[str]:
    """Tensors of the classifier module: all outside the body, and the pooler that only a classifier reads."""
    body = model.base_model_prefix + "."
    return [name for name in model.state_dict() if not name.startswith(body) or name.startswith(body + "pooler.")]


def fine_tune(job: Job) -> Path:
    """AdamW, linear warm-up and decay; on a GPU in TF32 or, by the plan, bfloat16. A model that is there is kept.

    Small models wait for launches, not for arithmetic: bfloat16 would only add casts to them, and asking for the loss
    after every step would let the GPU wait for the host.
    """
    if job.done:
        return job.folder
    from isomerge.checkpoint.memory import quiet_transformers

    start = time.perf_counter()
    inputs, task = (
        Inputs(job.base, job.data, job.plan.examples, job.plan.tested, job.plan.length),
        CORPORA[job.corpus].task,
    )
    model = new_model(job.base, task, job.seed, job.plan.layers).to(job.device).train()
    torch.manual_seed(job.seed)  # dropout
    generator = torch.Generator().manual_seed(job.seed + 100)
    count, plan = len(inputs.rows(job.corpus, "train")), job.plan
    steps = max(plan.epochs * math.ceil(count / plan.batch), plan.least_steps)
    warm_up = max(1, round(plan.warm_up * steps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / (steps - warm_up + 1)))
    )
    order: list[list[int]] = []
    total = torch.zeros((), device=job.device)
    kind = torch.device(job.device).type
    with _fast_products():
        for _ in range(steps):
            order = order or inputs.shuffled(job.corpus, plan.batch, generator, near=16 if plan.by_length else 1)
            chosen = order.pop()
            batch = _moved(next(inputs.batches(job.corpus, "train", len(chosen), chosen)), job.device)
            with torch.autocast(kind, torch.bfloat16, enabled=plan.bfloat16 and kind == "cuda"):
                outputs = model(**{key: value for key, value in batch.items() if key != "labels"})
            loss = loss_of(outputs.logits.float(), batch["labels"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.detach()
    job.folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.cpu().save_pretrained(job.folder)
    about = {"corpus": job.corpus, "seed": job.seed, "examples": count, "steps": steps,
             "mean_loss": float(total) / steps, "seconds": time.perf_counter() - start}  # fmt: skip
    (job.folder / "training.json").write_text(json.dumps(about))  # last: it says that the folder is whole
    return job.folder


@contextmanager
def _fast_products() -> Iterator[None]:
    """TF32 while training; merging and judging stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        return torch.nn.functional.mse_loss(logits[..., 0], labels.float())
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def _moved(batch: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in batch.items()}


# --- judging ----------------------------------------------------------------------------------------------------------
METRICS = {"emotion": "macro_f1", "emotion-6": "macro_f1", "ner": "f1", "CoLA": "accuracy", "STS-B": "pearson"}


class Judge:
    """Scores states of one base and task, in %; entities count by whole extents, over all sentences together."""

    def __init__(self, folder: Path, task: str, inputs: Inputs, device: str) -> None:
        self.model = load_model(folder).to(device).eval()
        self.head = head_names(self.model)
        self._task, self._inputs, self._device = task, inputs, device

    def __call__(self, state: State, corpus: str) -> dict[str, float]:
        self.take(state)
        return self.score(corpus)

    def take(self, state: State) -> None:
        """The model to judge from now on."""
        self.model.load_state_dict(state)

    def take_head(self, owner: State) -> None:
        """… with the head of another."""
        self.model.load_state_dict({name: owner[name] for name in self.head}, strict=False)

    @torch.no_grad()
    def score(self, corpus: str) -> dict[str, float]:
        counted = _counting(self._task)
        for batch in self._inputs.batches(corpus, "test", 250, self._inputs.by_length(corpus, "test")):
            batch = _moved(batch, self._device)
            outputs = self.model(**{key: value for key, value in batch.items() if key != "labels"})
            counted.add(*counted.predict(outputs, batch["labels"]))
        found = counted.result()
        return {"score": 100 * found["metrics"][METRICS[self._task]], "loss": found["loss"]}


def _counting(task: str) -> Any:
    from isomerge.evaluation.tasks import ClassificationTask, RegressionTask, TaggingTask

    if task == "STS-B":
        return RegressionTask()
    return TaggingTask(LABELS[task]) if task == "ner" else ClassificationTask(task)


def load_model(folder: Path) -> Any:
    import transformers

    from isomerge.checkpoint.memory import quiet_transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    with quiet_transformers():
        return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


def state_of(folder: Path) -> State:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def with_head(state: Mapping[str, Tensor], owner: Mapping[str, Tensor], head: Sequence[str]) -> State:
    """The body of one state and the head of another."""
    return {**state, **{name: owner[name] for name in head}}
