"""How much of a fine-tune's gain arrives on another base?

    python benchmarks/rebase.py [images text] [--seeds 3] [--texts shared/data/lm] [--out docs/results/rebase]

Images: stock ViTs of width 64 learn scikit-learn's digits, and the fine-tune digits that are turned by 90°. Text: stock
Llamas of width 64 learn the bytes of WikiText-2, and the fine-tune those of Shakespeare. The new base is the old one
trained further, one from another seed, or (images) a wider or a deeper one.

The share is (L(new base) − L(row)) / (L(base) − L(fine-tune)) on the test set of the new task, of the loss and of the
accuracy; *old* is the loss on the test set of the bases' own task. The control is a fine-tune of the new base with
labels, on the same examples, that gets the processor time that `rebase` with features took on this machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fusing import circumstances, mean_and_error
from torch import Tensor

import isomerge
from isomerge.demonstration import digits

Batch = dict[str, Tensor]
COLUMNS = (
    ("loss", 3),
    ("accuracy", 1),
    ("share of loss", 0),
    ("share of accuracy", 0),
    ("old loss", 3),
    ("seconds", 1),
)


class Skill(ABC):
    """One kind of model: its bases, the new task, and how both are measured."""

    targets: tuple[str, ...]
    few: int
    together: int
    """Examples of a batch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def models(self) -> dict[str, Any]:
        """`base`, `fine-tune` and every target."""

    @abstractmethod
    def batch(self, part: str, chosen: Tensor) -> Batch:
        """Examples, with labels, of `new` or `old`, or of their test sets."""

    @abstractmethod
    def size(self, part: str) -> int: ...

    def unlabelled(self, count: int, *, both: bool = False) -> Callable[[], Iterator[Batch]]:
        """Training examples of the new task, or half of them of the old one."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = ("new", "old") if both else ("new",)
        orders = [torch.randperm(self.size(part), generator=generator)[: count // len(parts)] for part in parts]

        def batches() -> Iterator[Batch]:
            for chosen in zip(*(order.split(self.together) for order in orders), strict=True):
                for part, own in zip(parts, chosen, strict=True):
                    yield {name: one for name, one in self.batch(part, own).items() if name != "labels"}

        return batches

    @torch.no_grad()
    def score(self, model: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for part, name in (("new test", "loss"), ("old test", "old loss")):
            losses, hits, seen = 0.0, 0.0, 0
            for chosen in torch.arange(self.size(part)).split(50):
                batch = self.batch(part, chosen)
                scores, labels = self.answers(model, batch)
                losses += float(F.cross_entropy(scores.double(), labels, reduction="sum"))
                hits, seen = hits + float((scores.argmax(-1) == labels).sum()), seen + len(labels)
            found[name] = losses / seen
            if name == "loss":
                found["accuracy"] = 100 * hits / seen
        return found

    @staticmethod
    def answers(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        labels = batch["labels"]
        return (scores, labels) if scores.dim() == 2 else (scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def trained(
        self, model: Any, part: str, steps: int | None, rate: float, seed: int, *, seconds: float = 0.0,
        among: int | None = None,
    ) -> Any:  # fmt: skip
        """Steps of AdamW on labels, so many or for so much processor time, with a rate that falls to zero."""
        model = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.size(part), generator=torch.Generator().manual_seed(self.seed))[:among]
        start, done = time.process_time(), 0.0
        step = 0
        while done < 1:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - done)
            chosen = order[torch.randint(len(order), (self.together,), generator=generator)]
            loss = F.cross_entropy(*self.answers(model, self.batch(part, chosen)))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            done = step / steps if steps else (time.process_time() - start) / seconds
        return model.eval()


class Images(Skill):
    """Digits, and digits turned by 90°."""

    targets = ("trained further", "another seed", "another seed, width 96", "another seed, 3 layers")
    few, together = 64, 64

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        known = digits.load_digits()
        turned = [torch.rot90(one, 1, (2, 3)).contiguous() for one in (known.train_images, known.test_images)]
        self._parts = {
            "old": (known.train_images, known.train_labels), "old test": (known.test_images, known.test_labels),
            "new": (turned[0], known.train_labels), "new test": (turned[1], known.test_labels),
        }  # fmt: skip

    def size(self, part: str) -> int:
        return len(self._parts[part][1])

    def batch(self, part: str, chosen: Tensor) -> Batch:
        images, labels = self._parts[part]
        return {"pixel_values": images[chosen], "labels": labels[chosen]}

    def models(self) -> dict[str, Any]:
        def base(number: int, **shape: Any) -> Any:
            return self.trained(self._new(1000 * self.seed + number, **shape), "old", 600, 2e-3, self.seed + number)

        first = base(0)
        return {
            "base": first, "fine-tune": self.trained(first, "new", 150, 5e-4, self.seed + 7),
            "trained further": self.trained(first, "old", 150, 3e-4, self.seed + 8), "another seed": base(1),
            "another seed, width 96": base(2, hidden_size=96, num_attention_heads=6, intermediate_size=192),
            "another seed, 3 layers": base(3, num_hidden_layers=3),
        }  # fmt: skip

    @staticmethod
    def _new(seed: int, **shape: Any) -> Any:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(**{**digits.new_model(0).config.to_dict(), **shape})
        torch.manual_seed(seed)
        return ViTForImageClassification(config)


class Texts(Skill):
    """Bytes of WikiText-2, and bytes of Shakespeare."""

    targets = ("trained further", "another seed")
    few, together = 64, 16
    LENGTH, STEPS = 64, 600
    folder: Path

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        files = {"old": "wikitext-2/wiki.train.tokens", "old test": "wikitext-2/wiki.test.tokens",
                 "new": "tinyshakespeare/input.txt", "new test": "tinyshakespeare/input.txt"}  # fmt: skip
        self._parts = {part: self._read(part, self.folder / file) for part, file in files.items()}

    def _read(self, part: str, path: Path) -> Tensor:
        content = path.read_bytes()
        cut = 9 * len(content) // 10
        own = {"new": content[:cut], "new test": content[cut:]}.get(part, content)
        own = own[: 4_000_000 if part == "old" else 600_000 if part == "new" else 64 * 300]
        ids = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return ids[: len(ids) // self.LENGTH * self.LENGTH].reshape(-1, self.LENGTH)

    def size(self, part: str) -> int:
        return len(self._parts[part])

    def batch(self, part: str, chosen: Tensor) -> Batch:
        ids = self._parts[part][chosen].long()
        return {"input_ids": ids, "labels": ids}

    def models(self) -> dict[str, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        def base(number: int) -> Any:
            torch.manual_seed(1000 * self.seed + number)
            shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
            return self.trained(LlamaForCausalLM(LlamaConfig(**shape)), "old", self.STEPS, 4e-3, self.seed + number)

        first = base(0)
        return {
            "base": first, "fine-tune": self.trained(first, "new", 200, 1e-3, self.seed + 7),
            "trained further": self.trained(first, "old", 200, 1e-3, self.seed + 8), "another seed": base(1),
        }  # fmt: skip


def rows(skill: Skill, folder: Path) -> Iterator[dict[str, Any]]:
    models = skill.models()
    for name, model in models.items():
        model.save_pretrained(folder / name)
    known = {name: skill.score(model) for name, model in models.items()}
    for name in ("base", "fine-tune"):
        yield {"target": "", "row": name, **known[name]}

    def carried(target: str, **settings: Any) -> tuple[dict[str, Any], float]:
        start = time.process_time()
        merged = isomerge.rebase(*(folder / name for name in ("fine-tune", "base", target)), **settings)
        seconds = time.process_time() - start
        return scored(target, load(merged, folder)), seconds

    def scored(target: str, model: Any) -> dict[str, Any]:
        found, base, tuned, onto = skill.score(model), known["base"], known["fine-tune"], known[target]
        gain = {key: tuned[key] - base[key] for key in ("loss", "accuracy")}
        return {**found, **{f"share of {key}": 100 * (found[key] - onto[key]) / gain[key] for key in gain}}

    for target in skill.targets:
        yield {"target": target, "row": "new base", **known[target]}
        alike = models[target].num_parameters() == models["base"].num_parameters()
        if alike:
            naive = copy.deepcopy(models[target])
            with torch.no_grad():
                for own, tuned, base in zip(*(m.parameters() for m in (naive, models["fine-tune"], models["base"])),
                                            strict=True):  # fmt: skip
                    own += tuned - base
            yield {"target": target, "row": "plain addition of τ", **scored(target, naive)}
            found, seconds = carried(target)
            yield {"target": target, "row": "rebase, no data", **found, "seconds": seconds}
            found, seconds = carried(target, data=skill.unlabelled(1024), correction="signs")
            yield {"target": target, "row": "rebase, signs", **found, "seconds": seconds}
        found, seconds = carried(target, data=skill.unlabelled(1024, both=True), correction="features")
        yield {"target": target, "row": "rebase, features, 1024 unlabelled, half of the old task", **found,
               "seconds": seconds}  # fmt: skip
        for count in (skill.few, 1024):
            found, seconds = carried(target, data=skill.unlabelled(count), correction="features")
            yield {"target": target, "row": f"rebase, features, {count} unlabelled", **found, "seconds": seconds}
            tuned = skill.trained(models[target], "new", None, 5e-4, skill.seed + 9, seconds=seconds, among=count)
            yield {"target": target, "row": f"control: fine-tune, {count} labelled", **scored(target, tuned),
                   "seconds": seconds}  # fmt: skip


def load(merged: Any, folder: Path) -> Any:
    import transformers

    written = merged.save(folder / "out", force=True, lock=False, report=False)
    kind = json.loads((written.out / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(written.out).eval()


def table(record: Mapping[str, Any], kind: str) -> str:
    own = [row for row in record["rows"] if row["kind"] == kind]
    lines = [f"| {kind} | " + " | ".join(key for key, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for target, name in dict.fromkeys((row["target"], row["row"]) for row in own):
        some = [row for row in own if (row["target"], row["row"]) == (target, name)]
        cells = [mean_and_error([row.get(key) for row in some], digits) for key, digits in COLUMNS]
        lines.append(f"| {f'*{target}*: ' if target else ''}{name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=["images", "text"], default=["images", "text"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--texts", type=Path, default=Path("shared/data/lm"))
    parser.add_argument("--out", type=Path, help="a folder for the table and the record")
    given = parser.parse_args()
    torch.set_num_threads(1)
    Texts.folder = given.texts
    record: dict[str, Any] = {**circumstances("cpu"), "rows": []}
    for kind in given.kinds:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as forgotten:
                for row in rows({"images": Images, "text": Texts}[kind](seed), Path(forgotten)):
                    record["rows"].append({"kind": kind, "seed": seed, **row})
                    print(json.dumps(record["rows"][-1]), flush=True)
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date'][:10]}"
    text = "\n\n".join([*(table(record, kind) for kind in given.kinds),
                        f"Means over {given.seeds} seeds, ± standard errors; shares in percent. {where}."])  # fmt: skip
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "rebase.json").write_text(json.dumps(record, indent=1) + "\n")
        title, _, about = (__doc__ or "").partition("\n")
        (given.out / "rebase.md").write_text(f"# {title}\n\n{about.strip()}\n\n{text}\n")


if __name__ == "__main__":
    sys.exit(main())
