"""The record of skills over several draws of the data, and how far merges are from their control."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import skills

PAIR = ["a", "b"]


def row(name: str, regret: float, *, draw: int = 0, tokens: int | None = 64, **more: Any) -> dict[str, Any]:
    entry = {"pair": PAIR, "row": name, "tokens": tokens, "draw": draw, "losses": [regret / 2 + 1] * 2}
    return {**entry, "regret": regret, "seconds": 1.0, **more}


def a_record(*rows: dict[str, Any]) -> skills.Record:
    about = {"device": "an abacus", "torch": "2", "commit": "abc", "date": "today"}
    record = skills.Record(None, about, {"a": 1.0, "b": 1.0})
    record.content["rows"] = list(rows)
    return record


def test_a_merge_is_compared_with_the_better_control_of_its_own_draw() -> None:
    record = a_record(
        row("own goals, 50 steps", 0.5), row("control: a, 50 steps", 0.6), row("control: b, 50 steps", 0.9),
        row("own goals, 50 steps", 0.8, draw=1), row("control: a, 50 steps", 0.9, draw=1),
        row("control: b, 50 steps", 0.7, draw=1), row("own goals, 50 steps", 0.1, draw=2),
    )  # fmt: skip
    (line,) = [line for line in skills.beside_control(record.content) if line.startswith("| own goals")]
    assert line == "| own goals, 50 steps | 64 | 0.00 ± 0.10 | 2 | 1 |"
    assert "| own goals, 50 steps | 64 | 1.233 | 1.233 | 0.47 ± 0.20 | 1 |" in skills.table(record.content)


def test_shares_are_found_in_the_same_draw_after_as_many_trial_steps() -> None:
    lean = [{"weights": [0.5, 0.5], "held_out": 0.3}, {"weights": [0.8, 0.2], "held_out": 0.2}]
    record = a_record(row("own goals, 200 steps", 1.0, lean=lean), row("own goals, dreams", 1.0, lean=lean[:1]))
    options: dict[str, Any] = {"lean": "found", "polish": skills.TRIAL}
    assert skills.found_lean(record, PAIR, 64, 0, options) == "0.8/0.2"
    assert skills.found_lean(record, PAIR, 64, 1, options) == "auto"
    assert skills.found_lean(record, PAIR, 64, 0, {"lean": "found"}) == "auto"
