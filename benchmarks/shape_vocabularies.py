"""Two language models of one text with BPE vocabularies of different size, for shapes.py: loss in nats per byte."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fusing import state_of, train_all
from lm_wikitext2 import encoded, open_tokenizer, read_texts, sequences, train
from skills import FULL, TINY

import isomerge
from isomerge.running.stock import load_stock

SIZES = {"first": 1024, "same": 1024, "other": 2048}  # tokens; two seeds of the first vocabulary
TEXT, TINY_TEXT = 6_000_000, 1_200_000  # characters of training text
STRETCH = 200  # characters that are read together when merging and testing
STEPS = 50


class Vocabularies:
    """The trained models, and texts to merge and to test them on."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.home: Path = given.work / ("vocabularies-tiny" if given.tiny else "vocabularies")
        base = dataclasses.replace(TINY, width=96, layers=3, heads=6, groups=3, hidden=256, context=96)
        self.plan = dataclasses.replace(base if given.tiny else FULL, epochs=given.epochs or 4)
        self.text = read_texts(given.wikitext, False)
        self.text["train"] = self.text["train"][: TINY_TEXT if given.tiny else TEXT]
        self.folders = {name: self.home / name for name in SIZES}

    def train(self) -> None:
        jobs = []
        for seed, (name, size) in enumerate(SIZES.items()):
            path = self.home / f"tokenizer-{size}.json"
            tokenizer = open_tokenizer(path, self.text["train"][:1_000_000], size)
            if not (self.folders[name] / "model.safetensors").exists():
                rows = sequences(encoded(tokenizer, self.text["valid"][:100_000]), self.plan.context)[:64]
                jobs.append((
                    self.folders[name], self.plan, encoded(tokenizer, self.text["train"]), rows,
                    tokenizer.get_vocab_size(), path, 10 * seed, self.given.device,
                ))  # fmt: skip
        train_all(train, jobs, self.given.together)

    def stretches(self, split: str, count: int) -> list[str]:
        """So many pieces of text, evenly over it."""
        text = self.text[split]
        starts = range(0, len(text) - STRETCH, max(STRETCH, (len(text) - STRETCH) // count))
        return ["\n" + text[start : start + STRETCH] for start in list(starts)[:count]]

    def data(self, tokens: int) -> Path:
        """A file of training texts, of about so many tokens of the first vocabulary."""
        path = self.home / f"texts-{tokens}.jsonl"
        if not path.exists():
            texts = self.stretches("train", max(2, tokens * 3 // STRETCH))
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    @torch.no_grad()
    def loss(self, config: dict[str, Any], state: Any, tokenizer: Path) -> float:
        """Nats per byte of the test text. Every text begins with a line's end, a token of its own in all vocabularies,
        so that all models predict the same bytes."""
        from tokenizers import Tokenizer

        model = load_stock({**config, "tie_word_embeddings": False}, state).to(self.given.device)
        reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        total = size = 0.0
        for text in self.stretches("test", self.given.limit or 200):
            ids = torch.tensor([reader.encode(text, add_special_tokens=False).ids], device=self.given.device)
            scores = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            total -= float(scores.gather(1, ids[0, 1:, None]).sum())
            size += len(text.encode()) - 1
        return total / size


def measure_vocabularies(models: Vocabularies, record: dict[str, Any]) -> None:
    given, folders = models.given, models.folders

    def enter(row: str, loss: float, **more: Any) -> None:
        record["vocabularies"].append({"row": row, "loss": loss, **more})
        print(json.dumps(record["vocabularies"][-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))

    def merge(row: str, pair: Sequence[Path], **options: Any) -> None:
        data, start = {"path": str(models.data(given.tokens)), "batch_size": 16}, time.perf_counter()
        merged = isomerge.merge(
            pair, method="reconstruct", data=data, device=given.device, output="predictions", **options
        )  # fmt: skip
        seconds, report = time.perf_counter() - start, merged.report()
        told = {name: report.get(name) for name in ("goals", "vocabularies", "output", "polished")}
        enter(row, models.loss(merged.config, merged.state_dict(), pair[0]), seconds=seconds, **told)

    for name, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        enter(f"parent: {name}", models.loss(config, state_of(folder), folder))
    first, same, other = folders.values()
    pairs = {"same vocabulary": [first, same], "other vocabulary": [first, other], "into the other": [other, first]}
    for steps in (0, STEPS):
        words = f", {steps} steps" if steps else ""
        for name, pair in pairs.items():
            merge(f"{name}{words}", pair, start="merge", polish=steps)
            merge(f"{name}{words}, control: its first parent", pair, start="parent-1", polish=steps)


def vocabulary_table(record: dict[str, Any]) -> str:
    lines = ["| row | nats per byte | seconds |", "|---|---|---|"]
    for row in record["vocabularies"]:
        lines.append(f"| {row['row']} | {row['loss']:.4f} | {row.get('seconds', 0):.0f} |")
    return "\n".join(lines)
