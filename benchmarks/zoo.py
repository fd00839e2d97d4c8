"""A zoo of pairs of small models, and what their means really lose: the calibration of `isomerge check`.

    python benchmarks/zoo.py --json zoo.json                          # a CPU core, tens of minutes, no data needed
    python benchmarks/zoo.py --fit zoo.json                           # writes the quantiles and the plot of the docs
    python benchmarks/zoo.py --device cuda --seeds 3 --json zoo.json

Three kinds of stock models: byte-level Llamas on Python's manual and on its library, Llamas of one operation of
arithmetic each (benchmarks/arithmetic.py), and ViTs on scikit-learn's digits. Of each kind there is a base, fine-tunes
of it at several rates on all or on a part of what it knows (siblings near and far, of one skill and of different ones),
and models trained apart (strangers). Every two of a kind are a pair. The mean is measured on what each model learned,
 and *lost* is its loss above that model's own, the mean of both, divided by the logarithm of the number of outputs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arithmetic import DIGITS, EQUALS, OPERATIONS, any_symbol, expressions, new_model
from fusing import circumstances
from lm_wikitext2 import read_texts
from skills import library
from torch import Tensor

import isomerge
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.running.stock import load_stock

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
NEIGHBOURS = 24  # measured pairs that a quantile is taken of
GRID = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.41)
Draw = Callable[[torch.Generator], dict[str, Tensor]]
"""A batch with labels."""


@dataclass(frozen=True)
class Kind:
    """Models of one architecture, and what they may learn."""

    name: str
    outputs: int
    new: Callable[[int], Any]
    base: Draw
    skills: dict[str, Draw]
    steps: int
    fine: int


# --- the three kinds --------------------------------------------------------------------------------------------------
def texts(seed: int) -> Kind:
    parts = {"manual": read_texts(None, True)["train"], "library": library(400_000)}
    tokens = {n: torch.tensor(list(t.encode("utf-8", "replace")), dtype=torch.int64) for n, t in parts.items()}

    def draw(name: str) -> Draw:
        def batch(random: torch.Generator) -> dict[str, Tensor]:
            starts = torch.randint(len(tokens[name]) - 65, (24,), generator=random)
            rows = torch.stack([tokens[name][s : s + 64] for s in starts.tolist()])
            return {"input_ids": rows, "labels": rows}

        return batch

    def both(random: torch.Generator) -> dict[str, Tensor]:
        halves = [draw(name)(random) for name in tokens]
        return {key: torch.cat([half[key][:12] for half in halves]) for key in halves[0]}

    return Kind(
        "texts", 256, lambda n: llama(256, seed + n), both, {n: draw(n) for n in tokens} | {"both": both}, 500, 80
    )


def sums(seed: int) -> Kind:
    rows = {name: expressions(name, 20_000, place) for place, name in enumerate(OPERATIONS)}

    def draw(name: str) -> Draw:
        def batch(random: torch.Generator) -> dict[str, Tensor]:
            part = rows[name][torch.randint(len(rows[name]), (256,), generator=random)]
            return {"input_ids": part, "labels": part}

        return batch

    def any_operation(random: torch.Generator) -> dict[str, Tensor]:
        name = OPERATIONS[int(torch.randint(len(OPERATIONS), (1,), generator=random))]
        part = any_symbol(draw(name)(random)["input_ids"])
        return {"input_ids": part, "labels": part}

    def new(n: int) -> Any:
        return new_model(seed + n)

    assert len(rows[OPERATIONS[0]][0]) == 3 * DIGITS + 2
    return Kind("arithmetic", EQUALS + 1, new, any_operation, {n: draw(n) for n in OPERATIONS[1:]}, 500, 150)


def digits(seed: int) -> Kind:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(classes)

    def draw(wanted: Sequence[int]) -> Draw:
        places = torch.nonzero(torch.isin(labels, torch.tensor(wanted)))[:, 0]

        def batch(random: torch.Generator) -> dict[str, Tensor]:
            chosen = places[torch.randint(len(places), (128,), generator=random)]
            return {"pixel_values": images[chosen], "labels": labels[chosen]}

        return batch

    skills = {"low": draw(range(5)), "high": draw(range(5, 10)), "all": draw(range(10))}
    return Kind("digits", 10, lambda n: vit(seed + n), draw(range(10)), skills, 250, 80)


def llama(words: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
        initializer_range=0.06, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ))  # fmt: skip


def vit(seed: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


# --- training and measuring -------------------------------------------------------------------------------------------
def train(model: Any, draw: Draw, steps: int, rate: float, seed: int) -> Any:
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    random = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / steps)
        batch = {key: value.to(model.device) for key, value in draw(random).items()}
        optimiser.zero_grad()
        model(**batch).loss.backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def loss(model: Any, draw: Draw) -> float:
    random = torch.Generator().manual_seed(12345)
    batches = [{key: value.to(model.device) for key, value in draw(random).items()} for _ in range(4)]
    return sum(float(model(**batch).loss) for batch in batches) / len(batches)


def members(kind: Kind, home: Path, device: str) -> Iterator[tuple[str, str, str, Path]]:
    """(family, skill, name, folder): every fine-tune of the base, and models trained apart."""

    def keep(model: Any, name: str) -> Path:
        folder = home / kind.name / name
        model.save_pretrained(folder)
        return folder

    base = train(kind.new(0).to(device), kind.base, kind.steps, 3e-3, 0)
    for number, (skill, rate) in enumerate(itertools.product(kind.skills, RATES)):
        model = train(copy.deepcopy(base), kind.skills[skill], kind.fine, rate, 10 + number)
        yield "siblings", skill, f"{skill}-{rate:g}", keep(model, f"{skill}-{rate:g}")
    for number, skill in enumerate(kind.skills, start=1):
        model = train(kind.new(number).to(device), kind.skills[skill], kind.steps, 3e-3, 100 + number)
        yield f"apart-{number}", skill, f"apart-{skill}", keep(model, f"apart-{skill}")


def pairs(kind: Kind, home: Path, device: str) -> Iterator[dict[str, Any]]:
    found = list(members(kind, home, device))
    states = {folder: isomerge.open_checkpoint(folder) for *_, folder in found}
    weights = {f: {name: c.read(name) for name in c.tensors} for f, c in states.items()}
    models = {f: load_stock(states[f].config, weights[f]).to(device) for f in weights}
    own = {folder: loss(models[folder], kind.skills[skill]) for _, skill, _, folder in found}
    for a, b in itertools.combinations(found, 2):
        mean = load_stock(states[a[3]].config, isomerge.merge_state_dicts([weights[a[3]], weights[b[3]]])).to(device)
        lost = [loss(mean, kind.skills[one[1]]) - own[one[3]] for one in (a, b)]
        told = isomerge.check(a[3], b[3])
        yield {
            "kind": kind.name, "models": [a[2], b[2]], "siblings": a[0] == b[0], "one_skill": a[1] == b[1],
            "verdict": told.verdict, "distance": told.distance, "cosine": told.cosine,
            "sign_conflict": told.sign_conflict, "lost": sum(lost) / 2, "share": sum(lost) / 2 / math.log(kind.outputs),
        }  # fmt: skip


# --- calibration ------------------------------------------------------------------------------------------------------
def quantiles(rows: Sequence[dict[str, Any]], distance: float) -> tuple[float, float, float]:
    """Of the nearest pairs, by the logarithm of their distance."""
    near = sorted(rows, key=lambda row: abs(math.log(row["distance"] / distance)))[:NEIGHBOURS]
    shares = torch.tensor([max(0.0, row["share"]) for row in near], dtype=torch.float64)
    low, middle, high = shares.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return low, middle, high


def knots(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float, float, float]]:
    """Rising with the distance."""
    found: list[tuple[float, float, float, float]] = []
    least = min(row["distance"] for row in rows)
    for distance in (one for one in GRID if one >= least):  # nearer models lose less than those: a line to zero
        low, middle, high = quantiles(rows, distance)
        before = found[-1][1:] if found else (0.0, 0.0, 0.0)
        found.append((distance, max(low, before[0]), max(middle, before[1]), max(high, before[2])))
    return found


def at(curve: Sequence[tuple[float, ...]], distance: float) -> tuple[float, float, float]:
    before: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    for knot in curve:
        if distance <= knot[0]:
            part = (distance - before[0]) / (knot[0] - before[0])
            return tuple(a + part * (b - a) for a, b in zip(before[1:], knot[1:], strict=True))  # type: ignore[return-value]
        before = knot
    return before[1:]  # type: ignore[return-value]


def coverage(rows: Sequence[dict[str, Any]]) -> float:
    """How often a pair lies in the range that the others give."""
    inside = 0
    for place, row in enumerate(rows):
        low, _, high = at(knots([*rows[:place], *rows[place + 1 :]]), row["distance"])
        inside += low - 1e-9 <= max(0.0, row["share"]) <= high + 1e-9
    return inside / len(rows)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    ranks = [torch.tensor(list(x), dtype=torch.float64).argsort().argsort().double() for x in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def fit(record: dict[str, Any], root: Path) -> None:
    rows = [row for row in record["pairs"] if row["distance"]]
    curve = knots(rows)
    lines = "".join(f"    ({', '.join(f'{number:.4g}' for number in knot)}),\n" for knot in curve)
    target = root / "src/isomerge/checking/zoo_quantiles.py"
    head = target.read_text(encoding="utf-8").split("PAIRS =")[0]
    target.write_text(f"{head}PAIRS = {len(rows)}\nKNOTS = (\n{lines})\n", encoding="utf-8")
    (root / "docs/images/mergeability.svg").write_text(plot(rows, curve), encoding="utf-8")
    shares = [row["share"] for row in rows]
    for key in ("distance", "cosine", "sign_conflict"):
        print(f"rank correlation of the loss with {key}: {rank_correlation([row[key] for row in rows], shares):+.2f}")
    print(f"{len(rows)} pairs; in the range that all others give: {100 * coverage(rows):.0f} %")


def plot(rows: Sequence[dict[str, Any]], curve: Sequence[tuple[float, ...]]) -> str:
    """Distance (logarithmic) against the share that was lost: pairs, and the range."""
    low, width, height = math.log(0.005), 560, 300

    def place(distance: float, share: float) -> tuple[float, float]:
        x = (math.log(max(distance, 0.005)) - low) / (math.log(1.6) - low)
        return round(50 + width * x, 1), round(20 + height * (1 - min(max(share, 0.0), 1.2) / 1.2), 1)

    upper = [place(knot[0], knot[3]) for knot in curve]
    lower = [place(knot[0], knot[1]) for knot in reversed(curve)]
    middle = " ".join(f"{x},{y}" for x, y in (place(knot[0], knot[2]) for knot in curve))
    band = " ".join(f"{x},{y}" for x, y in [*upper, *lower])
    colours = {"texts": "#1f6f8b", "arithmetic": "#b5542c", "digits": "#5b7f2e"}
    dots = []
    for row in rows:
        x, y = place(row["distance"], row["share"])
        dots.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colours[row["kind"]]}" fill-opacity="0.6"/>')
    ticks = []
    for distance in (0.01, 0.03, 0.1, 0.3, 1.0):
        x, y = place(distance, 0.0)
        ticks.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{distance:g}</text>')
    for share in (0.0, 0.5, 1.0):
        ticks.append(f'<text x="44" y="{place(0.01, share)[1] + 4}" text-anchor="end">{share:g}</text>')
    legend = [
        f'<text x="{70 + 90 * k}" y="34" fill="{colour}">{name}</text>'
        for k, (name, colour) in enumerate(colours.items())
    ]
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 370" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="370" fill="white"/>',
        f'<polygon points="{band}" fill="#999" fill-opacity="0.3"/>',
        f'<polyline points="{middle}" fill="none" stroke="#333"/>', *dots, *ticks, *legend,
        '<text x="330" y="360" text-anchor="middle">relative distance of two models</text>',
        '<text x="14" y="170" text-anchor="middle" transform="rotate(-90 14 170)">lost, of ln(outputs)</text>',
        "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1, help="make every kind so many times")
    parser.add_argument("--kinds", nargs="+", choices=["texts", "arithmetic", "digits"])
    parser.add_argument(
        "--json", type=Path, help="the record, written after every kind; one that is there is continued"
    )
    parser.add_argument("--fit", type=Path, metavar="JSON", help="calibrate by a record instead of making one")
    given = parser.parse_args()
    if given.fit:
        fit(json.loads(given.fit.read_text()), Path(__file__).parents[1])
        return
    if given.device == "cpu":
        torch.set_num_threads(1)
    record: dict[str, Any] = {"benchmark": "zoo", **circumstances(given.device), "made": [], "pairs": []}
    if given.json and given.json.exists():
        record = json.loads(given.json.read_text())
    with tempfile.TemporaryDirectory() as work, quiet_transformers():
        for seed, make in itertools.product(range(given.seeds), (digits, sums, texts)):
            kind = make(1000 * seed)
            if (given.kinds and kind.name not in given.kinds) or [kind.name, seed] in record["made"]:
                continue
            for row in pairs(kind, Path(work) / str(seed), given.device):
                record["pairs"].append(row)
                print(json.dumps(row), flush=True)
            record["made"].append([kind.name, seed])
            if given.json:
                given.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
