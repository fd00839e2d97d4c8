"""What Table 1 knows of the models it merges, against measuring them anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import language
import parents
import runner
import table1
from language import Job

from paper.small_jobs import job


def reordered(job: Job) -> None:
    """The same function with the units of a feed-forward in another order, so that there is something to move back."""
    file = language.fine_tune(job) / "model.safetensors"
    state, at = load_file(file), "bert.encoder.layer.0."
    order = torch.arange(len(state[at + "intermediate.dense.bias"])).flip(0)
    for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
        state[at + name] = state[at + name][order].contiguous()
    state[at + "output.dense.weight"] = state[at + "output.dense.weight"][:, order].contiguous()
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("base", "mark"), [(0, "+match"), (1, "+match"), (0, "+full")])
def test_a_moved_model_is_known_as_if_it_had_been_measured_where_it_is(
    base: int, mark: str, models: Path, data: Path, tmp_path: Path
) -> None:
    jobs = [job(models, data, tmp_path, "CoLA", base=base, seed=seed) for seed in (0, 1)]
    if mark == "+full":
        reordered(jobs[1])
    for each in jobs:
        parents.made((each, True))
    anchor, parent = (parents.parent_of(each) for each in jobs)
    matching = table1.MATCHINGS[mark]
    assert matching is not None
    there, (before, after) = parents.moved(parent, anchor, matching)
    assert 0 < after < before
    changed = [name for name in there.state if not torch.equal(there.state[name], parent.state[name])]
    assert 0 < len(changed) < len(there.state)
    assert there.seen is not None and parent.seen is not None
    grams, fisher = there.gram(), there.fisher()
    assert set(fisher.fisher) == set(there.seen.fisher)
    for name, expected in fisher.fisher.items():
        near = 1e-3 * float(expected.max()) + 1e-12
        torch.testing.assert_close(there.seen.fisher[name].double(), expected, rtol=1e-3, atol=near, msg=name)
    assert grams.weights == there.seen.weights
    for name in grams.weights:
        measured, found = grams.gram(name), there.seen.gram(name)
        torch.testing.assert_close(found.product, measured.product, rtol=1e-3, atol=1e-3, msg=name)
        assert found.count == measured.count
    # And it is another one than before: the test would notice a model that was not measured again.
    moved_most = max(changed, key=lambda name: float((there.state[name] - parent.state[name]).norm()))
    difference = (there.seen.fisher[moved_most] - parent.seen.fisher[moved_most]).norm()
    assert float(difference) > 1e-2 * float(parent.seen.fisher[moved_most].norm())


def test_a_model_that_is_trained_anew_is_measured_anew(models: Path, data: Path, tmp_path: Path) -> None:
    own = job(models, data, tmp_path, "CoLA")
    parents.made((own, True))
    parents.measured_file(own).write_bytes(b"of a model that was there before")
    (own.folder / "training.json").unlink()
    parents.made((own, True))
    parent = parents.parent_of(own)
    assert parent.seen is not None and parent.seen.fisher.keys() == parent.state.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::isomerge.merging.regression.StatisticsWarning")
def test_what_was_measured_goes_when_all_of_a_base_is_judged(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "work" / "table1.cells.json"

    def measured() -> list[Path]:
        return sorted((tmp_path / "work").rglob("measured-*.safetensors"))

    def start(*more: str) -> None:
        runner.main("table1", "title", "paper", table1.script, [*tiny, *more])

    judge, asked = table1.judged_group, []

    def stopped(group: table1.Group) -> dict[str, object]:
        asked.append(group)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return judge(group)

    monkeypatch.setattr(table1, "judged_group", stopped)
    with pytest.raises(KeyboardInterrupt):
        start()
    there = measured()
    assert len(there) == 4 and len(json.loads(kept.read_text())) == 1  # two sets of two tasks, of the first base
    start("--finished")
    assert measured() == there  # a table with gaps is no end
    monkeypatch.setattr(table1, "judged_group", judge)
    with monkeypatch.context() as patch:
        patch.setattr(table1, "forget", lambda jobs: None)  # as if it had been killed just before
        start()
    for no_run in ("--finished", "--dry-run"):
        start(no_run)
        assert len(measured()) == 8
    start()
    assert measured() == []
