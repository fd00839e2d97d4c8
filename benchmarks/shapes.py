"""Language models of different widths, depths and skills merged into one, and one with more room: what shape costs.

    python benchmarks/shapes.py --wikitext FOLDER --shakespeare FILE --work DIR --device cuda --together
    python benchmarks/shapes.py --tiny                                    # two CPU cores, no data needed

Models as in skills.py, the second also of another width and of another depth than the first. Rows: the same shape,
another width, another depth, and more room for both (`width`). The control is the better parent of those that fit into
the result's shape, with its output map fitted to the same data and goals. Rows with more room do not lean to a parent:
compare them with the row of the same shape that does not either. Columns: test loss on each text in nats per token; the
regret, Σ over texts of the loss above that text's own parent; parameters of the result. A second table is of two models
of one text whose BPE vocabularies are of different size (`--only vocabularies`, shape_vocabularies.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fusing import circumstances, state_of, train_all
from lm_wikitext2 import Plan, train
from shape_vocabularies import Vocabularies, measure_vocabularies, vocabulary_table
from skills import EPOCHS, FULL, TINY, Skills, shared_arguments

import isomerge
from isomerge.running.stock import load_stock

OTHERS: dict[str, dict[str, int]] = {
    "width": {"width": 256, "heads": 8, "groups": 4, "hidden": 688},
    "depth": {"layers": 6},
}
TINY_OTHERS: dict[str, dict[str, int]] = {
    "width": {"width": 96, "heads": 6, "groups": 3, "hidden": 256},
    "depth": {"layers": 3},
}
WIDTHS = ("units=1.5,heads=1.5,stream=1.5", "2", "stream=2", "units=2,heads=2,stream=2")


class Shapes(Skills):
    """The models of two skills, and the second skill in other shapes."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.pair = list(self.folders)[:2]
        others = TINY_OTHERS if given.tiny else OTHERS
        base = TINY if given.tiny else FULL
        self.others: dict[str, tuple[Path, Plan]] = {
            shape: (self.home / f"{self.pair[1]}-{shape}", dataclasses.replace(base, **changes))
            for shape, changes in others.items()
        }

    def train(self) -> None:
        for name in [name for name in self.folders if name not in self.pair]:
            del self.folders[name]
        super().train()
        skill = self.pair[1]
        jobs = []
        for seed, (folder, plan) in enumerate(self.others.values()):
            if not (folder / "model.safetensors").exists():
                plan = dataclasses.replace(plan, epochs=self.given.epochs or EPOCHS.get(skill, 6))
                jobs.append((
                    folder, plan, self.tokens[skill]["train"], self.rows(skill, "valid")[:64],
                    self.tokenizer.get_vocab_size(), self.home / "tokenizer.json", 100 + seed, self.given.device,
                ))  # fmt: skip
        train_all(train, jobs, self.given.together)


def measure(shapes: Shapes, record: dict[str, Any]) -> None:
    given, pair = shapes.given, shapes.pair

    def losses(config: dict[str, Any], state: Any) -> list[float]:
        return [one["loss"] for one in shapes.results([load_stock(config, state).to(given.device)], pair)]

    def parent(folder: Path) -> list[float]:
        config = json.loads((folder / "config.json").read_text())
        return losses({**config, "tie_word_embeddings": False}, state_of(folder))

    def enter(row: str, folders: Sequence[Path], **options: Any) -> None:
        own = [parent(folder)[number] for number, folder in enumerate(folders)]
        start = time.perf_counter()
        data: Any = [shapes.data(name, given.tokens) for name in pair]
        merged = isomerge.merge(folders, method="reconstruct", data=data, device=given.device, **options)
        seconds, state, report = time.perf_counter() - start, merged.state_dict(), merged.report()
        found = losses(merged.config, state)
        lost = report.get("features", {}).get("lost", {})
        record["rows"].append({
            "row": row, "losses": found, "regret": sum(found) - sum(own), "own": own, "seconds": seconds,
            "parameters": sum(tensor.numel() for tensor in state.values()), "matched": report.get("matched"),
            "lost": {kind: sum(of.values()) / len(of) for kind, of in lost.items() if of},
        })  # fmt: skip
        print(json.dumps(record["rows"][-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))

    first, second = (shapes.folders[name] for name in pair)
    enter("same shape", [first, second])
    enter("same shape, control", [first, second], start="parent")
    enter("same shape, not leaning", [first, second], lean="no")
    for shape, (folder, _) in shapes.others.items():
        enter(f"second of another {shape}", [first, folder])
        enter(f"second of another {shape}, control", [first, folder], start="parent")
    for width in WIDTHS:
        enter(f"width {width}", [first, second], lean="no", width=width)


def table(record: dict[str, Any]) -> str:
    lines = ["| row | losses | regret | parameters | lost: stream, units and heads | seconds |", "|---" * 6 + "|"]
    for row in record["rows"]:
        losses = " / ".join(f"{loss:.3f}" for loss in row["losses"])
        lost = ", ".join(f"{100 * row['lost'][kind]:.0f} %" for kind in ("stream", "chosen") if kind in row["lost"])
        lines.append(
            f"| {row['row']} | {losses} | {row['regret']:.2f} | {row['parameters'] / 1e6:.2f}M | {lost or '–'} | "
            f"{row['seconds']:.0f} |"
        )
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return f"{where}; {record['tokens']:,} tokens of each text\n" + "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = shared_arguments(__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, help="tokens of each text that merges see (16384)")
    parser.add_argument("--only", choices=("shapes", "vocabularies"), help="one half of the benchmark")
    given = parser.parse_args()
    if not given.tiny and None in (given.wikitext, given.shakespeare, given.work):
        parser.error("--wikitext, --shakespeare and --work are needed, unless --tiny is given")
    given.tokens = given.tokens or (2048 if given.tiny else 16384)
    return given


def main() -> None:
    given = arguments()
    if given.tiny:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        record: dict[str, Any] = {"benchmark": "shapes", "tokens": given.tokens, **circumstances(given.device)}
        record |= {"rows": [], "vocabularies": []}
        if given.only != "vocabularies":
            shapes = Shapes(given)
            shapes.train()
            measure(shapes, record)
            print(table(record))
        if given.only != "shapes":
            models = Vocabularies(given)
            models.train()
            measure_vocabularies(models, record)
            print(vocabulary_table(record))


if __name__ == "__main__":
    main()
