"""What measuring functions return is typed, reads like its JSON, and can be copied and pickled."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import isomerge
from isomerge.calibration import calibrate
from isomerge.connectivity.barrier import Barrier
from isomerge.connectivity.curve_result import TrainedCurve
from isomerge.connectivity.plane import Plane
from isomerge.ensembling.measure import EnsembleEvaluation
from isomerge.evaluation.evaluate import Evaluation
from isomerge.evaluation.verify import Verification
from isomerge.results import Result
from isomerge.sweeping.result import Sweep
from models import bert


def test_results_are_typed_and_can_be_copied(tmp_path: Path) -> None:
    models = []
    for seed, name in enumerate("abc"):
        bert(tmp_path / name, "sequence", ["bad", "good"], seed=seed)
        models.append(str(tmp_path / name))
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "\n".join(f"a b {n},{'good' if n % 2 else 'bad'}" for n in range(5))
    )
    data = {"path": tmp_path / "rows.csv", "limit": 4}
    recipe = {"merge_method": "linear", "models": [{"model": model} for model in models[:2]]}
    results: dict[type[Result], Result] = {
        Evaluation: isomerge.evaluate(models[0], data),
        EnsembleEvaluation: isomerge.ensemble(models, data),
        Barrier: isomerge.barrier(models[0], models[1], data=data, points=3, align=True),
        TrainedCurve: isomerge.curve(models[0], models[1], data=data, steps=2, points=3, method="simplex", samples=1),
        Plane: isomerge.plane(*models, data=data, points=2),
        Sweep: isomerge.sweep(recipe, {"t": [0, 1]}, data=data),
        Verification: isomerge.verify(models[0]),
    }
    for kind, result in results.items():
        assert type(result) is kind
        record = result.to_dict()
        assert json.loads(json.dumps(record)).keys() == record.keys() == set(result)
        for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
            assert again == result and again.to_dict() == record
    barrier, plain = results[Barrier], isomerge.barrier(models[0], models[1], loss=lambda model: 1.0, points=3)
    assert isinstance(barrier, Barrier) and barrier.aligned and barrier.aligned.barrier == barrier["aligned"]["barrier"]
    assert "aligned" not in plain and "data" not in plain and plain.get("data") is None and plain.ensemble is None
    statistics = calibrate(models[0], data)
    copied = pickle.loads(pickle.dumps(statistics))
    assert copied.to_dict() == statistics.to_dict() and statistics.to_dict()["examples"] == 4
