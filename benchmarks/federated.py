"""Federated strategies on handwritten digits whose clients know unlike classes, each beside FedAvg at equal rounds.

    python benchmarks/federated.py --json docs/results/federated.json --seeds 5      # again: goes on from the record
    python benchmarks/federated.py --seeds 1 --rounds 2 --clients 7 --only fedavg aligned-common

Ten clients share 1097 images of scikit-learn's digits (Dirichlet, alpha 1) and take 20 steps a round on a stock
`ViTForImageClassification` of 9,700 numbers; the server has 200 other images without labels, which two strategies use.
`one`: all start from the global model. `apart`: in the first round each client starts from random weights of its own.
`hostile`: two of ten clients send their updates with the sign flipped, as they are or five times as large. The rounds
are those of examples/federated on Flower, run in one process; tests/federated compares the two. The last accuracy is
the mean of the last three rounds. What each strategy is asked for is in examples/federated/fleet/strategies.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "federated"))
from fleet import task
from fleet.strategies import STRATEGIES, arguments_of

from isomerge.demonstration.digits import load_digits
from isomerge.errors import IsomergeError
from isomerge.federated import ClientUpdate, aggregate, expand

GUARDS = ("fedavg", "clip", "median", "krum")
LEARNERS = [name for name in STRATEGIES if name not in GUARDS[1:]]
SETTINGS: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "clean": (list(GUARDS), 30, {}),
    "hostile": (list(GUARDS), 30, {"hostile": 2}),
    "hostile x5": (list(GUARDS), 30, {"hostile": 2, "flip": 5.0}),
    "one": (LEARNERS, 12, {}),
    "apart": (LEARNERS, 12, {"apart": True}),
}
"""Strategies, rounds, and what differs."""
LAST = 3  # rounds whose mean is the last accuracy


@dataclass
class Round:
    """The global model after a round, the bytes sent both ways in it, and why it was left out, if it was."""

    model: task.State
    bytes: int
    error: IsomergeError | None = None


def rounds_of(name: str, rounds: int, given: dict[str, Any]) -> Iterator[Round]:
    """The rounds of examples/federated, without a framework."""
    digits = load_digits()
    about = STRATEGIES[name]
    given = {**task.DEFAULTS, **given, **about.get("clients", {})}
    start = task.new_model(given["seed"])
    arguments, model = arguments_of(name, start.config.to_dict(), digits), task.sent(start)
    for number in range(1, rounds + 1):
        settings = dict(arguments)
        if number > about.get("align_rounds", rounds):
            settings["align"] = "none"
        answers = task.answers(model, number, digits, range(given["clients"]), given)
        moved = given["clients"] * size(model) + sum(size(state) for state, _ in answers)
        updates = [
            ClientUpdate(str(n), expand(model, state) if given["rank"] else state, examples)
            for n, (state, examples) in enumerate(answers)
        ]
        try:
            result = aggregate(model, updates, **settings)
        except IsomergeError as error:  # the round is left out, as on Flower
            yield Round(model, moved, error)
            continue
        model = result.state
        if result.config is not None:
            arguments["config"] = result.config
        yield Round(model, moved)


def run(name: str, rounds: int, given: dict[str, Any]) -> dict[str, Any]:
    """Accuracy after each round, bytes, units of a feed-forward, and the number of rounds that were left out."""
    digits = load_digits()
    record: dict[str, Any] = {"accuracy": [], "bytes": [], "units": [], "left_out": 0}
    for number, one in enumerate(rounds_of(name, rounds, given), 1):
        if one.error is not None:
            print(f"  {name}, round {number}: {one.error}")
            record["left_out"] += 1
        record["accuracy"].append(round(task.accuracy(one.model, digits), 4))
        record["bytes"].append(one.bytes)
        record["units"].append(max(len(t) for key, t in one.model.items() if key.endswith("intermediate.dense.weight")))
    return record


def size(state: task.State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def last(record: dict[str, Any]) -> float:
    return sum(record["accuracy"][-LAST:]) / len(record["accuracy"][-LAST:])


def reached(record: dict[str, Any], goal: float) -> tuple[int, int] | None:
    """The first round after which the accuracy is at least this, and the bytes sent until then."""
    rounds = next((number for number, share in enumerate(record["accuracy"], 1) if share >= goal), None)
    return None if rounds is None else (rounds, sum(record["bytes"][:rounds]))


# --- tables -----------------------------------------------------------------------------------------------------------
def mean(values: list[float]) -> tuple[float, float]:
    """With its standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")


def table(runs: dict[str, dict[str, Any]], setting: str) -> list[str]:
    """Accuracy in percent with its standard error over seeds, and what it took to be where FedAvg ended without hostile
    clients."""
    rounds = max((len(one["accuracy"]) for key, one in runs.items() if key.startswith(setting + "/")), default=0)
    shown = sorted({n for n in (1, 2, 4, 8, rounds) if n <= rounds})
    lines = [
        "strategy".ljust(16)
        + "".join(f"{f'round {n}':>15}" for n in shown)
        + f"{'last':>15}{'rounds':>8}{'MB':>8}  seeds"
    ]
    for name in SETTINGS[setting][0]:
        found = {key.split("/")[2]: one for key, one in runs.items() if key.startswith(f"{setting}/{name}/")}
        if not found:
            continue
        cells = [mean([100 * one["accuracy"][n - 1] for one in found.values()]) for n in shown]
        cells.append(mean([100 * last(one) for one in found.values()]))
        beside = "clean" if setting.startswith("hostile") else setting
        goals = {seed: runs.get(f"{beside}/fedavg/{seed}") for seed in found}
        hits = [reached(found[seed], last(goal)) for seed, goal in goals.items() if goal is not None]
        there = [hit for hit in hits if hit is not None]
        line = name.ljust(16) + "".join(f"{f'{value:.1f} ± {error:.1f}':>15}" for value, error in cells)
        if there:
            line += f"{mean([hit[0] for hit in there])[0]:>8.1f}{mean([hit[1] / 1e6 for hit in there])[0]:>8.1f}"
        else:
            line += f"{'-':>8}{'-':>8}"
        lines.append(f"{line}  {len(there)}/{len(found)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record, which is continued")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="instead of each setting's own number")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--only", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--minutes", type=float, help="end before a run once this is over")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    about = {"rounds": asked.rounds, "clients": asked.clients, "alpha": asked.alpha}
    record: dict[str, Any] = {"about": about, "runs": {}}
    if asked.json is not None and asked.json.exists():
        record = json.loads(asked.json.read_text(encoding="utf-8"))
        if record["about"] != about:
            parser.error(f"{asked.json} is of {record['about']}")
    begun = time.monotonic()
    wanted = [
        (f"{setting}/{name}/{seed}", name, {**SETTINGS[setting][2], "seed": seed}, asked.rounds or SETTINGS[setting][1])
        for seed in range(asked.seeds)
        for setting in asked.settings
        for name in SETTINGS[setting][0]
        if name in asked.only
    ]
    for key, name, given, rounds in wanted:
        if asked.minutes is not None and time.monotonic() - begun > 60 * asked.minutes:
            break
        if key not in record["runs"]:
            before = time.process_time()
            record["runs"][key] = run(name, rounds, {"clients": asked.clients, "alpha": asked.alpha, **given})
            print(key, record["runs"][key]["accuracy"], f"{time.process_time() - before:.1f} s", flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for setting in asked.settings:
        print(f"\n{setting}", *table(record["runs"], setting), sep="\n")


if __name__ == "__main__":
    main()
