"""Models that know different things, merged into one: what each way keeps of both, beside its control.

    python benchmarks/skills.py --wikitext FOLDER --shakespeare FILE --work DIR --device cuda --together
    python benchmarks/skills.py … --pairs wikitext-manual --tokens 4096 --rows own control --json record.json
    python benchmarks/skills.py --images cifar10-jpeg.tar.xz --work DIR --device cuda   # image classifiers instead
    python benchmarks/skills.py … --json record.json --minutes 9          # the whole grid in parts, again until done
    python benchmarks/skills.py --tiny                                    # two CPU cores, no data needed
    python benchmarks/skills.py --tiny --wikitext FOLDER --shakespeare FILE --draws 3     # small models of these texts

Stock `LlamaForCausalLM`s with one vocabulary (a byte-level BPE trained on all texts), each trained on one text:
WikiText-2, Shakespeare and the manual pages that Python brings along; --tiny: these pages and Python's own library, in
width 64. Stock `ViTForImageClassification`s that each saw five classes of CIFAR-10, with ten logits. Merges see a few
tokens of each text or images of each half, and no labels. Columns: test loss on each in nats, and the regret, Σ over
skills of the loss above that skill's own parent; images also accuracy. The control starts from one parent instead of a
merge, with the same data, goals and steps: a merge that is not below it is not worth having. The ensemble weighted by
the posterior of its members is what one could reach. No row is tuned on test data: start, lean and rate of polishing
are chosen on held-out training examples, for the controls too. Which rates they are chosen from was picked on test text
of smaller models (docs/research/skills.md). A record that is there is continued, so that rows, pairs and amounts of
data may be measured one after the other; with --minutes a run ends before a row that would take it past that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fusing import State, circumstances, state_of, train_all
from lm_wikitext2 import PLANS, Plan, encoded, mean_loss, open_tokenizer, read_texts, sequences, train
from skill_images import ImageSkills
from torch import Tensor

import isomerge
from isomerge.merging.layerwise.candidates import TRIAL
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
    if given.wikitext is None:
        return {"manual": manual, "library": in_three(library(400_000))}
    wikitext = read_texts(given.wikitext, False)
    if given.tiny:
        wikitext["train"] = wikitext["train"][:1_000_000]
    return {
        "wikitext": wikitext,
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
ROUTED = "ensemble routed by features"
REFINE = 100
DREAMS = 512


def rows_of(pair: Sequence[str], steps: Sequence[int], *, texts: bool) -> dict[str, dict[str, Any]]:
    """Name → options of the merge, first what matters most. `lean` stands for the shares that own goals have found."""
    ways: dict[str, dict[str, Any]] = {
        "own goals": {"lean": "found"},
        "own goals, refined": {"lean": "found", "refine": REFINE},
        "expert goals": {"goals": "expert", "lean": "found"},
        "expert goals, refined": {"goals": "expert", "lean": "found", "refine": REFINE},
        "mean goals": {"goals": "mean", "features": "joint"},
        "mean goals, refined": {"goals": "mean", "features": "joint", "refine": REFINE},
    }
    rows: dict[str, dict[str, Any]] = {
        "own goals": {"lean": "found"},
        **{f"control: {name}": {"start": f"parent-{number}"} for number, name in enumerate(pair, start=1)},
        **{way: options for way, options in ways.items() if way != "own goals"},
        "own goals, not leaning": {"lean": "no"},
        "mean goals, output fitted": {"goals": "mean", "features": "joint", "output": "predictions"},
    }
    for count in sorted(steps, reverse=True):
        controls = {f"control: {name}": {"start": f"parent-{n}"} for n, name in enumerate(pair, start=1)}
        rows[f"own goals, {count} steps"] = {"lean": "found", "start": "merge", "polish": count}
        for way, options in {**controls, **ways}.items():
            rows.setdefault(f"{way}, {count} steps", {"start": "merge", **options, "polish": count})
        rows[f"own goals, {count} steps, best start"] = {"lean": "found", "polish": count}
        for way, options in {**controls, "own goals": {"lean": "found"}}.items() if texts else ():
            rows[f"{way}, dreams, {count} steps"] = {"start": "merge", **options, "polish": count, "dream": DREAMS}
    if not texts:
        rows = {ROUTED: {}, **rows}
    if texts:
        rows["mixture of experts"] = {"method": "mixture"}
        rows["mixture of experts, expert goals"] = {"method": "mixture", "goals": "expert"}
        rows["own goals, dreams"] = {"lean": "found", "dream": DREAMS}
    return rows


class Skills:
    """The trained models, their texts and how they are measured."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.draw = given, 0
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
        """Training sequences, drawn once for each `draw`; a count is of tokens."""
        rows = self.rows(name, "train")
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1 + self.draw))
        chosen = rows[order[: max(2, count // rows.shape[1])]]
        return lambda: ({"input_ids": part} for part in chosen.split(16))

    def test(self, name: str) -> Tensor:
        return self.rows(name, "test")[: self.given.limit or 200]

    def model(self, state: State) -> Any:
        config = json.loads((next(iter(self.folders.values())) / "config.json").read_text())
        state = {name: tensor.float() for name, tensor in state.items()}
        return load_stock({**config, "tie_word_embeddings": False}, state).to(self.given.device)

    def results(
        self, models: Sequence[Any], names: Sequence[str], *, posterior: bool = False
    ) -> list[dict[str, float]]:
        measure = posterior_loss if posterior else mean_loss
        return [{"loss": measure(models, self.test(name), self.given.device)} for name in names]


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
class Record:
    """All rows so far, on disk after every one of them."""

    def __init__(self, path: Path | None, about: Mapping[str, Any], own: Mapping[str, float]) -> None:
        self.path, self.own = path, own
        self.content: dict[str, Any] = {**about, "parents": dict(own), "rows": []}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            if any(abs(before["parents"].get(name, loss) - loss) > 1e-3 for name, loss in own.items()):
                raise SystemExit(f"{path} is the record of other models or other test data. Name another file.")
            self.content["parents"] = {**before["parents"], **own}
            self.content["rows"] = before["rows"]

    def find(self, pair: Sequence[str], row: str, tokens: int | None, draw: int = 0) -> dict[str, Any] | None:
        key = (list(pair), row, tokens, draw)
        rows = self.content["rows"]
        return next((r for r in rows if (r["pair"], r["row"], r["tokens"], r.get("draw", 0)) == key), None)

    def enter(
        self, pair: Sequence[str], row: str, tokens: int | None, results: Sequence[dict[str, float]], **more: Any
    ) -> None:
        losses = [result["loss"] for result in results]
        regret = sum(loss - self.own[name] for loss, name in zip(losses, pair, strict=True))
        entry = {"pair": list(pair), "row": row, "tokens": tokens, "losses": losses, "regret": regret, **more}
        if "accuracy" in results[0]:
            entry["accuracy"] = [result["accuracy"] for result in results]
        self.content["rows"].append(entry)
        print(json.dumps(entry), flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.content, indent=1))


class OutOfTime(Exception):
    pass


class Clock:
    """Whether there is time for one more row, as long as the longest so far."""

    def __init__(self, minutes: float | None) -> None:
        self.end = math.inf if minutes is None else time.perf_counter() + 60 * minutes
        self._longest = 0.0

    def took(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def require_time(self) -> None:
        if time.perf_counter() + self._longest > self.end:
            raise OutOfTime


def measure(skills: Any, pair: Sequence[str], record: Record, clock: Clock) -> None:
    given = skills.given
    folders = [skills.folders[name] for name in pair]
    states = [state_of(folder) for folder in folders]
    parents = [skills.model(state) for state in states]
    without_data: dict[str, Callable[[], list[dict[str, float]]]] = {
        "ensemble": lambda: skills.results(parents, pair),
        "ensemble by posterior": lambda: skills.results(parents, pair, posterior=True),
        "plain average": lambda: skills.results([skills.model(isomerge.merge_state_dicts(states))], pair),
        "full, no data": lambda: skills.results([skills.model(aligned_average(folders, states, given.device))], pair),
    }
    for row, results in without_data.items():
        if record.find(pair, row, None) is None:
            clock.require_time()
            record.enter(pair, row, None, results(), seconds=None)
    rows = rows_of(pair, given.steps, texts=not given.images)
    rows = {n: o for n, o in rows.items() if not given.rows or any(wants(text, n, rows) for text in given.rows)}
    for draw, tokens, (row, options) in itertools.product(range(given.draws), given.tokens, rows.items()):
        if record.find(pair, row, tokens, draw) is None:
            clock.require_time()
            skills.draw = draw
            if row == ROUTED:
                record.enter(pair, row, tokens, skills.routed(parents, pair, tokens), seconds=None, draw=draw)
                continue
            if "found" in options.values():
                options = {**options, "lean": found_lean(record, pair, tokens, draw, options)}
            clock.took(merge_and_enter(skills, pair, row, tokens, options, record))


def wants(text: str, name: str, names: Collection[str]) -> bool:
    """Whether a row is asked for, by its name or by a part of it."""
    return text == name if text in names else text in name


def merge_and_enter(
    skills: Any, pair: Sequence[str], row: str, tokens: int, options: Mapping[str, Any], record: Record
) -> float:
    """Seconds of the merge."""
    data: Any = [skills.data(name, tokens) for name in pair]
    folders, device = [skills.folders[name] for name in pair], skills.given.device
    start = time.perf_counter()
    rate = {"rate": skills.given.rate} if skills.given.rate and options.get("polish") else {}
    merged = isomerge.merge(folders, data=data, device=device, **{"method": "reconstruct", **options, **rate})
    seconds = time.perf_counter() - start
    report = merged.report()
    told = {key: report[key] for key in ("lean", "start", "polished", "router", "parameters") if key in report}
    results = skills.results([load_stock(merged.config, merged.state_dict()).to(device)], pair)
    record.enter(pair, row, tokens, results, seconds=seconds, draw=skills.draw, **told)
    return seconds


def found_lean(record: Record, pair: Sequence[str], tokens: int, draw: int, options: Mapping[str, Any]) -> str:
    """The shares that own goals chose with this data, so that other rows need not look for them again. Every number of
    steps from TRIAL on makes the same choice."""
    trial = min(options.get("polish", 0), TRIAL)
    for one in record.content["rows"]:
        row = re.fullmatch(r"own goals(?:, (\d+) steps)?", one["row"])
        same = (one["pair"], one["tokens"], one.get("draw", 0)) == (list(pair), tokens, draw)
        if row and same and one.get("lean") and min(int(row[1] or 0), TRIAL) == trial:
            return "/".join(str(share) for share in min(one["lean"], key=lambda tried: tried["held_out"])["weights"])
    return "auto"


def aligned_average(folders: Sequence[Path], states: Sequence[State], device: str) -> State:
    aligned: Any = isomerge.align(folders[1], folders[0], device=device)
    return isomerge.merge_state_dicts([states[0], aligned.state_dict()])


def table(record: Mapping[str, Any]) -> str:
    """A row is the mean over the draws of its data, with its standard error."""
    lines = []
    for pair in dict.fromkeys(tuple(row["pair"]) for row in record["rows"]):
        lines += [
            "",
            f"| {' + '.join(pair)} | data of each | {' | '.join(pair)} | regret | seconds |",
            "|---" * 6 + "|",
        ]
        own = sorted((r for r in record["rows"] if tuple(r["pair"]) == pair), key=lambda row: row["tokens"] or 0)
        for tokens, name in dict.fromkeys((row["tokens"], row["row"]) for row in own):
            draws = [row for row in own if (row["tokens"], row["row"]) == (tokens, name)]
            seconds = "–" if draws[0]["seconds"] is None else f"{mean_of(draws, 'seconds'):.0f}"
            scores = torch.tensor([row.get("accuracy") or [math.nan] * len(pair) for row in draws]).mean(0).tolist()
            losses = " | ".join(
                f"{loss:.3f}" + ("" if math.isnan(score) else f" ({100 * score:.1f} %)")
                for loss, score in zip(torch.tensor([r["losses"] for r in draws]).mean(0).tolist(), scores, strict=True)
            )
            regret = with_error([row["regret"] for row in draws])
            lines.append(f"| {name} | {'–' if tokens is None else f'{tokens:,}'} | {losses} | {regret} | {seconds} |")
    parents = ", ".join(f"{name} {loss:.3f}" for name, loss in record["parents"].items())
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return f"own parents: {parents}; {where}\n" + "\n".join([*lines, *beside_control(record)])


def beside_control(record: Mapping[str, Any]) -> list[str]:
    """How far the regret is from that of the control with the lowest, on test text; mean over pairs and draws."""
    regrets = {(tuple(r["pair"]), r.get("draw", 0), r["tokens"], r["row"]): r["regret"] for r in record["rows"]}
    settings = dict.fromkeys((pair, draw, tokens) for pair, draw, tokens, _ in regrets if tokens)
    lines = ["", "| less the better control | data of each | regret | of so many | lower |", "|---" * 5 + "|"]
    names = dict.fromkeys(row for *_, row in regrets if row.startswith("own goals"))
    for tokens, row in itertools.product(sorted({tokens for *_, tokens in settings}), names):
        ending = row.removeprefix("own goals").removesuffix(", best start")
        apart = []
        for pair, draw, _ in (one for one in settings if one[2] == tokens):
            controls = [regrets.get((pair, draw, tokens, f"control: {name}{ending}")) for name in pair]
            own = regrets.get((pair, draw, tokens, row))
            if own is not None and None not in controls:
                apart.append(own - min(one for one in controls if one is not None))
        if apart:
            lower = sum(one < 0 for one in apart)
            lines.append(f"| {row} | {tokens:,} | {with_error(apart)} | {len(apart)} | {lower} |")
    return lines if len(lines) > 3 else []


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def with_error(values: Sequence[float]) -> str:
    """The mean and, of several values, its standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = f" ± {float(tensor.std()) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{float(tensor.mean()):.2f}{error}"


def shared_arguments(description: str) -> argparse.ArgumentParser:
    """Of benchmarks on models of these texts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--wikitext", type=Path, help="a folder with one file of text for each of train, valid and test"
    )
    parser.add_argument("--shakespeare", type=Path, help="a file of text")
    parser.add_argument("--work", type=Path, help="models are kept here and used again; --tiny: forgotten if not named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", action="store_true", help="train all models at once, one process each")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--limit", type=int, help="test on that many sequences or images of each")
    parser.add_argument("--json", type=Path, help="the record, written after every row")
    parser.add_argument("--tiny", action="store_true", help="small models and data: minutes on two CPU cores")
    return parser


def arguments() -> argparse.Namespace:
    parser = shared_arguments(__doc__.split("\n")[0])
    parser.add_argument("--images", help="CIFAR-10 as an archive or folder: image classifiers instead of texts")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--pairs", nargs="+", help="as in wikitext-manual; if not named all")
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="TEXT",
        help="only merges of these names, or with one of these texts in them",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="tokens of each text (4096 16384 65536) or images (100 500 2000)"
    )
    parser.add_argument("--draws", type=int, default=1, help="measure with that many draws of the data (1)")
    parser.add_argument("--steps", nargs="+", type=int, help="gradient steps of the last stage (50 200); 0: none")
    parser.add_argument(
        "--rate", type=float, help="of polishing, for all rows; if not named it is looked for, as always"
    )
    parser.add_argument("--minutes", type=float, help="end after so long, before a row; the same command goes on")
    given = parser.parse_args()
    missing = None in (given.wikitext, given.shakespeare) and not given.images
    if not given.tiny and (missing or given.work is None):
        parser.error("--work and --images, or --work, --wikitext and --shakespeare are needed, unless --tiny is given")
    amounts = [2048] if given.tiny else [100, 500, 2000] if given.images else [4096, 16384, 65536]
    given.tokens = given.tokens or amounts
    given.steps = [count for count in given.steps or ([50] if given.tiny else [50, 200]) if count]
    return given


def main() -> None:
    given = arguments()
    if given.tiny:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as forgotten:
        given.work = given.work or Path(forgotten)
        skills: Any = ImageSkills(given) if given.images else Skills(given)
        skills.train()
        if given.train_only:
            return
        own = {
            name: skills.results([skills.model(state_of(folder))], [name])[0]["loss"]
            for name, folder in skills.folders.items()
        }
        about = {"benchmark": "skills", "tiny": given.tiny, **circumstances(given.device)}
        record = Record(given.json, about, own)
        pairs = [tuple(pair.split("-")) for pair in given.pairs or ()] or itertools.combinations(skills.folders, 2)
        clock, left = Clock(given.minutes), ""
        try:
            for pair in pairs:
                measure(skills, pair, record, clock)
        except OutOfTime:
            left = "\nnot finished: the same command goes on with this record"
        print(table(record.content) + left)


if __name__ == "__main__":
    main()
