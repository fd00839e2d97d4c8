"""Four fine-tunes of one base that each solve one operation of arithmetic, merged into one model that solves all four.

    python benchmarks/arithmetic.py                       # two CPU cores, minutes, no data needed
    python benchmarks/arithmetic.py --device cuda --work DIR --json record.json

Stock Llamas of two layers and width 64 read `a a ∘ b b = c c`: two digits each, one token a digit, and ∘ is
one of four operations by digit, modulo 10 (no carry). Two bases are made. *latent* has seen all operations, but symbols
meant nothing: it knows the answers, and not which one is asked for, as a pre-trained model that fine-tuning gives a
task. *format* has seen random answers: it knows that an answer is two digits. From each, four models are fine-tuned on
one operation each, with the tables frozen; their symbol never changes, so none of them has to read it. Merges see
`--expressions` expressions of each operation (of 10,000), without answers: with --complete, the owner's own answer is
appended. Tests are another draw (4 % overlap); an answer counts if both digits are right. The control is one parent
instead of a merge, with the same data, goals and steps.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fusing import State, circumstances, state_of
from torch import Tensor

import isomerge
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.running.stock import load_stock

DIGITS = 2
OPERATIONS = ("add", "subtract", "multiply", "larger")
EQUALS = 10 + len(OPERATIONS)
BASES = {"latent": {"steps": 600, "fine": 250, "rate": 2e-3}, "format": {"steps": 100, "fine": 700, "rate": 5e-3}}
SEEN, TESTED = 100, 200  # seeds of the expressions that merges see, and of those they are tested on
Numbers = dict[str, float]


# --- expressions ------------------------------------------------------------------------------------------------------
def expressions(operation: str, count: int, seed: int) -> Tensor:
    """(count, 8): random `a a ∘ b b = c c`, digits and symbols as tokens."""
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randint(10, (2, count, DIGITS), generator=draw)
    answers = {"add": a + b, "subtract": a - b, "multiply": a * b, "larger": torch.maximum(a, b)}
    symbol = torch.full((count, 1), 10 + OPERATIONS.index(operation))
    return torch.cat([a, symbol, b, torch.full((count, 1), EQUALS), answers[operation] % 10], 1)


@torch.no_grad()
def answered(model: Any, questions: Tensor) -> Tensor:
    """The questions with the model's own answers, digit by digit."""
    rows = questions.to(model.device)
    for _ in range(DIGITS):
        rows = torch.cat([rows, model(input_ids=rows).logits[:, -1:].argmax(-1)], 1)
    return rows.cpu()


def accuracy(model: Any, rows: Tensor) -> float:
    """The share of whole answers that are right."""
    return float((answered(model, rows[:, :-DIGITS]) == rows).all(1).double().mean())


# --- models -----------------------------------------------------------------------------------------------------------
def new_model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=EQUALS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=False,
    ))  # fmt: skip


def train(model: Any, rows: Tensor, steps: int, rate: float, seed: int, blur: Callable[[Tensor], Tensor]) -> None:
    """Next tokens of whole expressions; `blur` makes of each batch what the model is to see of it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / steps)
        batch = blur(rows[torch.randint(len(rows), (256,), generator=draw)]).to(model.device)
        optimiser.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()


def any_symbol(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, DIGITS] = 10 + torch.randint(len(OPERATIONS), (len(rows),))
    return rows


def any_answer(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, -DIGITS:] = torch.randint(10, (len(rows), DIGITS))
    return rows


def make_models(home: Path, kind: str, device: str) -> list[Path]:
    """The base and four fine-tunes of it, kept under `home`."""
    folders = [home / name for name in ("base", *OPERATIONS)]
    if all((folder / "model.safetensors").exists() for folder in folders):
        return folders
    plan = BASES[kind]
    base = new_model().to(device)
    rows = {name: expressions(name, 20_000, seed) for seed, name in enumerate(OPERATIONS)}
    train(
        base,
        torch.cat(list(rows.values())),
        int(plan["steps"]),
        5e-3,
        0,
        any_symbol if kind == "latent" else any_answer,
    )
    base.save_pretrained(folders[0])
    for seed, (name, folder) in enumerate(zip(OPERATIONS, folders[1:], strict=True), start=1):
        model = copy.deepcopy(base)
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
        train(model, rows[name], int(plan["fine"]), plan["rate"], seed, lambda batch: batch)
        model.save_pretrained(folder)
    return folders


# --- rows -------------------------------------------------------------------------------------------------------------
def rows_of(steps: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Name → options of the merge; those of reconstruct where no method is named."""
    rows: dict[str, dict[str, Any]] = {
        "mean": {"method": "linear"},
        "task arithmetic, weight 0.5": {"method": "task_arithmetic", "weight": 0.5},
        "TIES, density 0.5": {"method": "ties", "density": 0.5, "weight": 1.0},
        "RegMean": {"method": "regmean"},
        "mean goals": {"goals": "mean"},
        "mean goals, joint features": {"goals": "mean", "features": "joint"},
        "own goals": {"lean": "no"},
        "own goals, mean features": {"features": "mean"},
        "own goals, mean features, refined": {"features": "mean", "refine": 100},
        "expert goals, mean features": {"goals": "expert", "features": "mean"},
        "control: one parent, output fitted": {"start": "parent"},
    }
    for count in steps:
        rows[f"own goals, {count} steps"] = {"polish": count, "start": "merge", "lean": "no"}
        rows[f"own goals, mean features, {count} steps"] = {"polish": count, "start": "merge", "features": "mean"}
        rows[f"control: one parent, {count} steps"] = {"polish": count, "start": "parent"}
    return rows


class Arithmetic:
    """One base with its fine-tunes, and how merges of them are measured."""

    def __init__(self, kind: str, given: argparse.Namespace) -> None:
        self.given, self.kind = given, kind
        self.base, *self.folders = make_models(given.work / kind, kind, given.device)
        self.seen = [expressions(n, given.expressions, SEEN + k)[:, :-DIGITS] for k, n in enumerate(OPERATIONS)]
        if given.complete:
            owners = [self.model(state_of(folder)) for folder in self.folders]
            self.seen = [answered(owner, rows) for owner, rows in zip(owners, self.seen, strict=True)]
        self.tests = [expressions(n, 500, TESTED + k) for k, n in enumerate(OPERATIONS)]

    def data(self) -> list[Callable[[], Iterator[dict[str, Tensor]]]]:
        return [lambda rows=rows: ({"input_ids": part} for part in rows.split(32)) for rows in self.seen]  # type: ignore[misc]

    def model(self, state: State) -> Any:
        config = json.loads((self.base / "config.json").read_text())
        return load_stock(config, state).to(self.given.device)

    def accuracies(self, state: State) -> Numbers:
        model = self.model(state)
        return {name: accuracy(model, rows) for name, rows in zip(OPERATIONS, self.tests, strict=True)}

    def merged(self, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        method = options.get("method", "reconstruct")
        more: dict[str, Any] = {"device": self.given.device}
        if method in ("task_arithmetic", "ties"):
            more["base"] = self.base
        elif method != "linear":
            more["data"] = self.data()
        merged = isomerge.merge(self.folders, **{"method": "reconstruct", **options}, **more)
        return merged.state_dict(), merged.report()


def cosines(folders: Sequence[Path]) -> tuple[float, float]:
    """The least and the greatest of all pairs."""
    found = [isomerge.check(a, b).cosine or 0.0 for a, b in itertools.combinations(folders, 2)]
    return min(found), max(found)


def measure(case: Arithmetic, record: dict[str, Any]) -> None:
    given = case.given

    def enter(row: str, scores: Numbers, seconds: float | None = None, **more: Any) -> None:
        entry = {"base": case.kind, "row": row, "accuracy": scores, "worst": min(scores.values())}
        record["rows"].append({**entry, "seconds": seconds, **more})
        print(json.dumps(record["rows"][-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))

    low, high = cosines(case.folders)
    record["cosines"][case.kind] = [low, high]
    enter("base", case.accuracies(state_of(case.base)))
    parents = [case.accuracies(state_of(folder)) for folder in case.folders]
    enter("each on its own operation", {name: own[name] for name, own in zip(OPERATIONS, parents, strict=True)})
    for row, options in rows_of(given.steps).items():
        if given.rows and not any(text in row for text in given.rows):
            continue
        start = time.perf_counter()
        state, report = case.merged(options)
        told = {key: report[key] for key in ("lean", "start") if key in report}
        enter(row, case.accuracies(state), time.perf_counter() - start, **told)


def table(record: dict[str, Any]) -> str:
    lines = []
    for kind in dict.fromkeys(row["base"] for row in record["rows"]):
        low, high = record["cosines"][kind]
        lines += ["", f"Base: {kind}; cosines of pairs {low:.3f} to {high:.3f}", ""]
        lines += [f"| {record['expressions']} expressions of each | {' | '.join(OPERATIONS)} | worst | seconds |"]
        lines += ["|---" * 7 + "|"]
        for row in (row for row in record["rows"] if row["base"] == kind):
            cells = [f"{100 * row['accuracy'][name]:.0f} %" for name in OPERATIONS]
            seconds = "–" if row["seconds"] is None else f"{row['seconds']:.0f}"
            lines.append(f"| {row['row']} | {' | '.join(cells)} | {100 * row['worst']:.0f} % | {seconds} |")
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return "\n".join([where, *lines])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, help="models are kept here and used again; forgotten if not named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--expressions", type=int, default=400, help="of each operation, without answers")
    parser.add_argument(
        "--complete", action=argparse.BooleanOptionalAction, default=True, help="append the owner's own answers"
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[200, 600])
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only merges whose name contains one of these texts")
    parser.add_argument("--json", type=Path, help="the record, written after every row")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.device == "cpu":
        torch.set_num_threads(1)  # matrices this small are slower on two
    quiet_transformers()
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        record: dict[str, Any] = {
            "benchmark": "arithmetic", **circumstances(given.device), "expressions": given.expressions,
            "complete": given.complete, "cosines": {},
            "rows": [],
        }  # fmt: skip
        for kind in given.bases:
            measure(Arithmetic(kind, given), record)
        print(table(record))


if __name__ == "__main__":
    main()
