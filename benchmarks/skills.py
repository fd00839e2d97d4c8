"""Language models that know different texts, merged into one: what each way keeps of both, beside its control.

    python benchmarks/skills.py --wikitext FOLDER --shakespeare FILE --work DIR --device cuda --together
    python benchmarks/skills.py --tiny                                    # two CPU cores, no data needed

Stock `LlamaForCausalLM`s with one vocabulary (a byte-level BPE trained on all texts), each trained on one text:
WikiText-2, Shakespeare and the manual pages that Python brings along; --tiny: these pages and Python's own library, in
width 64. Merges see a few tokens of each text and no labels. Columns: test loss on each text in nats per token, and the
regret, Σ over texts of the loss above that text's own parent. The control starts from one parent instead of a merge,
with the same data, goals and steps: a merge that is not below it is not worth having. The ensemble weighted by the
posterior of its members, token by token, is what one could reach. Nothing is tuned on test text.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fusing import State, circumstances, state_of, train_all
from lm_wikitext2 import PLANS, Plan, encoded, mean_loss, open_tokenizer, read_texts, sequences, train
from torch import Tensor

import isomerge
from isomerge.running.stock import load_stock

FULL = dataclasses.replace(PLANS["llama"], width=320, layers=5, heads=10, groups=5, hidden=864, batch=32)
TINY = dataclasses.replace(
    PLANS["llama"], width=64, layers=2, heads=4, groups=2, hidden=172, vocabulary=1024, context=64, batch=16, rate=3e-3,
    decay=0.1, dropout=0.0,
)  # fmt: skip
EPOCHS = {"wikitext": 8, "shakespeare": 14, "manual": 16}
Texts = dict[str, dict[str, str]]


# --- texts ------------------------------------------------------------------------------------------------------------
def texts_of(given: argparse.Namespace) -> Texts:
    manual = read_texts(None, given.tiny)
    if given.tiny:
        return {"manual": manual, "library": in_three(library(400_000))}
    return {
        "wikitext": read_texts(given.wikitext, False),
        "shakespeare": in_three(given.shakespeare.read_text(encoding="utf-8")),
        "manual": manual,
    }


def library(length: int) -> str:
    """Source text of Python's library, file after file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:length]


def in_three(text: str) -> dict[str, str]:
    ends = [0, int(0.9 * len(text)), int(0.95 * len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(ends)]
    return dict(zip(("train", "valid", "test"), parts, strict=True))


# --- rows -------------------------------------------------------------------------------------------------------------
def rows_of(steps: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Name → options of the merge."""
    rows: dict[str, dict[str, Any]] = {
        "mean goals, joint": {"goals": "mean", "features": "joint"},
        "mean goals, joint, output fitted": {"goals": "mean", "features": "joint", "output": "predictions"},
        "own goals": {},
        "own goals, not leaning": {"lean": "no"},
        "expert goals": {"goals": "expert"},
        "control: one parent, output fitted": {"start": "parent"},
    }
    for count in steps:
        rows[f"own goals, {count} steps"] = {"polish": count, "start": "merge"}
        rows[f"own goals, {count} steps, the better of merge and control"] = {"polish": count}
        rows[f"control: one parent, {count} steps"] = {"polish": count, "start": "parent"}
    return rows


class Skills:
    """The trained models, their texts and how they are measured."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.plan: Plan = TINY if given.tiny else FULL
        self.home = given.work / ("skills-tiny" if given.tiny else "skills")
        texts = texts_of(given)
        sample = "".join(text["train"][:1_000_000] for text in texts.values())
        self.tokenizer = open_tokenizer(self.home / "tokenizer.json", sample, self.plan.vocabulary)
        self.tokens = {name: {s: encoded(self.tokenizer, part) for s, part in t.items()} for name, t in texts.items()}
        self.folders = {name: self.home / name for name in texts}

    def rows(self, name: str, split: str) -> Tensor:
        return sequences(self.tokens[name][split], self.plan.context)

    def train(self) -> None:
        jobs = []
        for seed, (name, folder) in enumerate(self.folders.items()):
            if not (folder / "model.safetensors").exists():
                plan = dataclasses.replace(self.plan, epochs=self.given.epochs or EPOCHS.get(name, 6))
                jobs.append((
                    folder, plan, self.tokens[name]["train"], self.rows(name, "valid")[:64],
                    self.tokenizer.get_vocab_size(), self.home / "tokenizer.json", 10 * seed, self.given.device,
                ))  # fmt: skip
        train_all(train, jobs, self.given.together)

    def data(self, name: str, count: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        """Training sequences, drawn once; a count is of tokens."""
        rows = self.rows(name, "train")
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        chosen = rows[order[: max(2, count // rows.shape[1])]]
        return lambda: ({"input_ids": part} for part in chosen.split(16))

    def test(self, name: str) -> Tensor:
        return self.rows(name, "test")[: self.given.limit or 200]

    def model(self, state: State) -> Any:
        config = json.loads((next(iter(self.folders.values())) / "config.json").read_text())
        return load_stock({**config, "tie_word_embeddings": False}, state).to(self.given.device)

    def losses(self, models: Sequence[Any], names: Sequence[str], *, posterior: bool = False) -> list[float]:
        measure = posterior_loss if posterior else mean_loss
        return [measure(models, self.test(name), self.given.device) for name in names]


@torch.no_grad()
def posterior_loss(models: Sequence[Any], rows: Tensor, device: str, batch: int = 32) -> float:
    """Of the mixture in which a member weighs as much as the tokens so far were likely to it."""
    total = 0.0
    for ids in rows.split(batch):
        ids = ids.to(device)
        scores = torch.stack([model(input_ids=ids).logits.float().log_softmax(-1) for model in models])[:, :, :-1]
        told = scores.gather(3, ids[None, :, 1:, None].expand(len(models), -1, -1, 1))[..., 0]
        before = torch.cat([torch.zeros_like(told[:, :, :1]), told.cumsum(2)[:, :, :-1]], 2)
        total -= float((before.log_softmax(0) + told).logsumexp(0).mean()) * len(ids)
    return total / len(rows)


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(skills: Skills, pair: Sequence[str], own: dict[str, float], record: dict[str, Any]) -> None:
    given = skills.given
    folders = [skills.folders[name] for name in pair]
    states = [state_of(folder) for folder in folders]

    def enter(row: str, tokens: int | None, losses: Sequence[float], seconds: float | None = None, **more: Any) -> None:
        regret = sum(loss - own[name] for loss, name in zip(losses, pair, strict=True))
        entry = {"pair": list(pair), "row": row, "tokens": tokens, "losses": list(losses), "regret": regret}
        record["rows"].append({**entry, "seconds": seconds, **more})
        print(json.dumps(record["rows"][-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))

    parents = [skills.model(state) for state in states]
    enter("ensemble", None, skills.losses(parents, pair))
    enter("ensemble by posterior", None, skills.losses(parents, pair, posterior=True))
    enter("plain average", None, skills.losses([skills.model(isomerge.merge_state_dicts(states))], pair))
    aligned = isomerge.align(folders[1], folders[0], device=given.device).state_dict()
    enter("full, no data", None, skills.losses([skills.model(isomerge.merge_state_dicts([states[0], aligned]))], pair))
    rows = {n: o for n, o in rows_of(given.steps).items() if not given.rows or any(text in n for text in given.rows)}
    for tokens, (row, options) in itertools.product(given.tokens, rows.items()):
        data: Any = [skills.data(name, tokens) for name in pair]
        start = time.perf_counter()
        merged = isomerge.merge(folders, method="reconstruct", data=data, device=given.device, **options)
        seconds = time.perf_counter() - start
        report = merged.report()
        told = {key: report[key] for key in ("lean", "start") if key in report}
        enter(row, tokens, skills.losses([skills.model(merged.state_dict())], pair), seconds, **told)


def table(record: dict[str, Any]) -> str:
    lines = []
    for pair in dict.fromkeys(tuple(row["pair"]) for row in record["rows"]):
        lines += [
            "",
            f"| {' + '.join(pair)} | tokens of each | {' | '.join(pair)} | regret | seconds |",
            "|---" * 6 + "|",
        ]
        for row in (row for row in record["rows"] if tuple(row["pair"]) == pair):
            seconds = "–" if row["seconds"] is None else f"{row['seconds']:.0f}"
            losses = " | ".join(f"{loss:.3f}" for loss in row["losses"])
            tokens = "–" if row["tokens"] is None else f"{row['tokens']:,}"
            lines.append(f"| {row['row']} | {tokens} | {losses} | {row['regret']:.2f} | {seconds} |")
    parents = ", ".join(f"{name} {loss:.3f}" for name, loss in record["parents"].items())
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return f"own parents: {parents}; {where}\n" + "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--wikitext", type=Path, help="a folder with one file of text for each of train, valid and test"
    )
    parser.add_argument("--shakespeare", type=Path, help="a file of text")
    parser.add_argument("--work", type=Path, help="models are kept here and used again; --tiny: forgotten if not named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", action="store_true", help="train all models at once, one process each")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--pairs", nargs="+", help="as in wikitext-manual; if not named all")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only merges whose name contains one of these texts")
    parser.add_argument("--tokens", nargs="+", type=int, help="tokens of each text that merges see (4096 16384 65536)")
    parser.add_argument("--steps", nargs="+", type=int, help="gradient steps of the last stage (50 200)")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--limit", type=int, help="test on that many sequences")
    parser.add_argument("--json", type=Path, help="the record, written after every row")
    parser.add_argument("--tiny", action="store_true", help="small models and data: minutes on two CPU cores")
    given = parser.parse_args()
    if not given.tiny and None in (given.wikitext, given.shakespeare, given.work):
        parser.error("--wikitext, --shakespeare and --work are needed, unless --tiny is given")
    given.tokens = given.tokens or ([2048] if given.tiny else [4096, 16384, 65536])
    given.steps = given.steps or ([50] if given.tiny else [50, 200])
    return given


def main() -> None:
    given = arguments()
    if given.tiny:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        skills = Skills(given)
        skills.train()
        if given.train_only:
            return
        own = {
            name: skills.losses([skills.model(state_of(folder))], [name])[0] for name, folder in skills.folders.items()
        }
        record = {"benchmark": "skills", "tiny": given.tiny, **circumstances(given.device), "parents": own, "rows": []}
        pairs = [tuple(pair.split("-")) for pair in given.pairs or ()] or itertools.combinations(skills.folders, 2)
        for pair in pairs:
            measure(skills, pair, own, record)
        print(table(record))


if __name__ == "__main__":
    main()
