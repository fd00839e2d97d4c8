"""Figure 4: the loss of merged models when only some layers were matched.

    python benchmarks/paper/figure4.py --scale small --data DATA --models MODELS --work DIR

One layer; the last n; the first n. The paper does not say which two models it merges. Read first: the model of CoLA and
the one of STS-B, the result tested on both with the head of each, as in its Table 1. Read second: two models of one
task, from different seeds. Matching is the paper's: rotations, in attention only.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corpora import CORPORA, prepare
from crew import cells, side_by_side
from encoding import Inputs
from language import (
    Job,
    Judge,
    Plan,
    State,
    base_path,
    bases_of,
    fine_tune,
    origin,
    plan_for,
    state_of,
    title,
    with_head,
)
from runner import Mean, Plot, Result, Run, Table, main

SETS = {"reduced": ("CoLA", "STS-B"), "small": ("CoLA", "STS-B"), "original": ("glue-cola", "glue-stsb")}
WAYS = {"single": "one layer", "first": "the first n", "last": "the last n"}
ACROSS, WITHIN = "a model of each task", "two seeds of a task"
STRIDES = {("reduced", "HuggingFaceTB/SmolLM2-135M-Instruct"): 2, ("small", "HuggingFaceTB/SmolLM2-135M-Instruct"): 3}
"""Of deep models every so many layers are looked at."""
ORDINALS = {2: "second", 3: "third"}
LEAST = 1e-4
"""Of a loss: less is nothing, however little it varies."""
LAYER = re.compile(r"\.layers?\.(\d+)\.")


@dataclass(frozen=True)
class Pair:
    """The model that is moved, the one it is moved to, and every how many layers are looked at."""

    moved: Job
    anchor: Job
    stride: int


def script(run: Run) -> Result:
    sets = SETS[run.scale]
    plans = {base: plan_for(run.scale, base) for base in bases_of(run)}
    run.settings["plan"] = repr({title(base): plan for base, plan in plans.items()})
    prepare(run, sets)
    notes(run, plans)
    pairs: dict[str, Pair] = {}
    for base in reversed(plans):  # the larger first: side by side, the longest jobs should not be the last
        pairs |= pairs_of(run, base, plans[base], sets)
    if not run.dry:
        wanted = [pair for key, pair in pairs.items() if not run.known(key)]
        missing = dict.fromkeys(job for pair in wanted for job in (pair.moved, pair.anchor) if not job.done)
        side_by_side(run, fine_tune, list(missing))
    found = cells(run, measure, pairs)
    return Result([]) if run.dry else report([title(base) for base in plans], sets, found)


def pairs_of(run: Run, name: str, plan: Plan, sets: tuple[str, str]) -> dict[str, Pair]:
    """By both readings, for every seed."""
    base, stride = base_path(name, run.models), STRIDES.get((run.scale, name), 1)
    if told := origin(base):
        run.note(told)
    if stride > 1:
        run.note(f"{title(name)}: every {ORDINALS[stride]} layer, and numbers of layers in steps of {stride}.")
    jobs = {
        (corpus, seed): Job(base, corpus, seed, plan, run.data, run.work, run.device)
        for corpus in sets
        for seed in range(run.seeds)
    }
    if run.dry:
        for job in jobs.values():
            run.say(f"would fine-tune {base} on {job.corpus}, seed {job.seed}: {plan.epochs} epochs, rate {plan.rate}")
    one, other = sets
    pairs = {
        f"{title(name)}, {ACROSS}, seed {seed}": Pair(jobs[one, seed], jobs[other, seed], stride)
        for seed in range(run.seeds)
    }
    if run.seeds > 1:
        for corpus in sets:
            for seed in range(run.seeds if run.seeds > 2 else 1):
                after = (seed + 1) % run.seeds
                pair = Pair(jobs[corpus, seed], jobs[corpus, after], stride)
                pairs[f"{title(name)}, {WITHIN}, {corpus}, seeds {seed} and {after}"] = pair
    return pairs


def notes(run: Run, plans: Mapping[str, Plan]) -> None:
    if run.scale != "original":
        plan = next(iter(plans.values()))
        run.note(
            f"{' and '.join(title(base) for base in plans)} instead of DeBERTa; at most {plan.examples:,} training and "
            f"{plan.tested:,} test examples, {plan.epochs} epochs and at least {plan.least_steps} steps, batches of "
            f"{plan.batch}, rate {' and '.join(f'{each.rate:g}' for each in plans.values())}."
        )
    for base, plan in plans.items():
        if plan.layers:
            run.note(f"Only the first {plan.layers} layers of {title(base)}.")
    if run.seeds < 2:
        run.note(f"Left out: {WITHIN}, which takes two seeds.")
    run.note("The test sets are the public validation sets of GLUE.")


# --- measuring --------------------------------------------------------------------------------------------------------
def measure(pair: Pair) -> dict[str, Any]:
    """By task: the loss without matching, and by way the losses over the numbers of layers (or the layer's own)."""
    judges = {job.corpus: judge_of(job) for job in (pair.anchor, pair.moved)}
    head = judges[pair.anchor.corpus].head
    device = pair.moved.device  # on it once, not for each of the many mixtures
    plain, matched = ({name: value.to(device) for name, value in state.items()} for state in merged_bodies(pair, head))
    depth = 1 + max(layer_of(name) for name in plain)
    found: dict[str, Any] = {}
    for job in {job.corpus: job for job in (pair.moved, pair.anchor)}.values():
        owner, judge = state_of(job.folder), judges[job.corpus]

        def loss(layers: Sequence[int], owner: State = owner, judge: Judge = judge, corpus: str = job.corpus) -> float:
            return judge(with_head(mixed(plain, matched, layers), owner, head), corpus)["loss"]

        found[job.corpus] = {"parent": judge(owner, job.corpus)["loss"], **by_way(loss, depth, pair.stride)}
    return {"depth": depth, "losses": found}


def by_way(loss: Callable[[Sequence[int]], float], depth: int, stride: int = 1) -> dict[str, Any]:
    """The loss when no layer is matched, and by way of choosing layers."""
    counts = range(stride, depth + 1, stride)
    return {
        "none": loss([]),
        "single": {str(k): loss([k]) for k in range(0, depth, stride)},
        "first": {str(n): loss(range(n)) for n in counts},
        "last": {str(n): loss(range(depth - n, depth)) for n in counts},
    }


def judge_of(job: Job) -> Judge:
    inputs = Inputs(job.base, job.data, job.plan.examples, job.plan.tested, job.plan.length)
    return Judge(job.folder, CORPORA[job.corpus].task, inputs, job.device)


def merged_bodies(pair: Pair, head: Sequence[str]) -> tuple[State, State]:
    """Averages of the two models without and with matching; the head is the anchor's and not looked at."""
    import isomerge
    from isomerge.checkpoint.memory import MemoryCheckpoint

    anchor = state_of(pair.anchor.folder)
    config = json.loads((pair.anchor.folder / "config.json").read_text())
    # Heads of different tasks differ in shape; matching inside attention does not see them.
    source = with_head(state_of(pair.moved.folder), anchor, head)
    opened = [MemoryCheckpoint(name, state, config) for name, state in (("source", source), ("anchor", anchor))]
    alignment: Any = isomerge.align(*opened, level="rotation", only="attention", device=pair.moved.device)
    states = (source, alignment.state_dict())
    plain, matched = (isomerge.merge_state_dicts([state, anchor]) for state in states)
    return plain, matched


def mixed(plain: Mapping[str, Any], matched: Mapping[str, Any], layers: Sequence[int]) -> State:
    """The merge after matching these layers only: every rotation stays inside its layer."""
    return {name: matched[name] if layer_of(name) in layers else value for name, value in plain.items()}


def layer_of(name: str) -> int:
    """The number in the tensor's name; -1 for what is in no layer."""
    found = LAYER.search(name)
    return int(found[1]) if found else -1


# --- reporting --------------------------------------------------------------------------------------------------------
def report(bases: Sequence[str], sets: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> Result:
    result = Result([])
    for base in bases:
        depth = next((cell["depth"] for key, cell in found.items() if key.startswith(f"{base}, ")), None)
        if depth is None:  # nothing of it is finished
            continue
        readings = itertools.product((ACROSS, WITHIN), sets)
        groups = {f"{name}, {way}": losses_of(found, f"{base}, {way}", name) for way, name in readings}
        part = report_of(base, depth, {name: losses for name, losses in groups.items() if losses})
        result.tables += part.tables
        result.plots += part.plots
        result.claims += part.claims
    return result


def report_of(base: str, depth: int, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Result:
    """Of models of one shape: a row, a plot and a sentence for each group of pairs."""
    stride = min(int(n) for n in next(iter(groups.values()))[0]["first"])
    half = str(depth // 2 - (depth // 2) % stride)
    parts = {f"first {half}": ("first", half), f"last {half}": ("last", half), "all": ("first", str(depth))}
    rows: list[list[str | Mean]] = []
    plots: list[Any] = []
    claims: list[str] = []
    for name, losses in groups.items():
        changes = {part: change(losses, *where) for part, where in parts.items()}
        alone = [Mean([entry[key] for entry in losses], 4) for key in ("parent", "none")]
        rows.append([name, *alone, *changes.values()])
        plots.append(plot(f"{base}, {name}", losses, depth))
        claims.append(claim(f"{base}, {name}", losses, changes[f"first {half}"], changes[f"last {half}"], half))
    columns = ["", "one parent", "merged, nothing matched", f"change: first {half}", f"last {half}", "all layers"]
    return Result([Table(f"{base}: test loss, and how matching layers changes it", columns, rows)], plots, claims)


def losses_of(found: Mapping[str, Mapping[str, Any]], start: str, name: str) -> list[Mapping[str, Any]]:
    return [cell["losses"][name] for key, cell in found.items() if key.startswith(start) and name in cell["losses"]]


def change(losses: Sequence[Mapping[str, Any]], way: str, place: str) -> Mean:
    return Mean([entry[way][place] - entry["none"] for entry in losses], 6)


def plot(heading: str, losses: Sequence[Mapping[str, Any]], depth: int) -> Plot:
    """Layers are counted from 1, so that "layer 1", "the first 1" and "the last 1" share a place."""
    places = {way: [int(n) + (way == "single") for n in losses[0][way]] for way in WAYS}
    ticks = sorted({place for own in places.values() for place in own})
    means = {
        way: [change(losses, way, str(tick - (way == "single"))) if tick in places[way] else Mean([]) for tick in ticks]
        for way in WAYS
    }
    return Plot(
        heading,
        ticks,
        {WAYS[way]: [mean.mean for mean in row] for way, row in means.items()},
        x=f"layer, or number of layers, of {depth}",
        y="change of the test loss",
        errors={WAYS[way]: [mean.error for mean in row] for way, row in means.items()},
    )


def claim(where: str, losses: Sequence[Mapping[str, Any]], first: Mean, last: Mean, half: str) -> str:
    noise = 2 * max(first.error, last.error)
    held = "held" if first.mean < last.mean - noise and first.mean < 0 else "did not hold"
    if abs(first.mean - last.mean) <= noise:
        held = "not to be told from noise"
    if max(abs(first.mean), abs(last.mean)) < LEAST:
        held = f"not to be told from noise, as no half changes the loss by {LEAST:.4f}"
    if len(losses) < 3:
        held = "not decided, with fewer than three pairs"
    best = min(losses[0]["single"], key=lambda layer: change(losses, "single", layer).mean)
    drop = change(losses, "single", best)
    return (
        f"First layers matter most ({where}): {held}. Matching the first {half} layers "
        f"changes the loss by {first}, the last {half} by {last}; of single layers number {int(best) + 1} helps most "
        f"({drop})."
    )


if __name__ == "__main__":
    main("figure4", "Matching a subset of layers", "Figure 4 of the founding paper", script)
