"""Solved stages kept on the way, so that a run that was killed goes on after the last of them, to the same bytes.

A stage depends on the data, the parents and the stages before it, so its weights and its lines of the report are all
there is to keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isomerge.merging.layerwise.assembly import ChosenUnits, FeatureAssembly, JointStream
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.passes import DataPass


class KeptStages:
    """The stages of what will be the result; without a place to keep them, nothing is restored and nothing stored."""

    def __init__(self, run: LayerwiseMerge, examples: Sequence[DataPass], *, keep: bool = True) -> None:
        """`examples`: what the stages are solved on."""
        self._run, self._kept = run, run.inputs.kept if keep else None
        self._examples = examples
        self._lines = self._warnings = 0
        self._has_read = False

    def restore(self, name: str) -> Any:
        """Put the weights of a stage into the merged model and its lines into the report; None where nothing is kept,
        otherwise what was noted beside them."""
        part = self._kept.load(name) if self._kept is not None else None
        if part is None:
            self._mark()
            return None
        self._read_data()
        tensors, record = part
        parameters = dict(self._run.merged.named_parameters())
        with torch.no_grad():
            for parameter, tensor in tensors.items():
                parameters[parameter].copy_(tensor)
        self._run.report.layers += record["layers"]
        self._run.report.warnings += record["warnings"]
        return {"note": record["note"]}

    def store(self, name: str, owners: Iterable[str], note: Any = None) -> None:
        """Keep the weights below these modules, and what the report has gained."""
        if self._kept is None:
            return
        report, owners = self._run.report, tuple(f"{owner}." if owner else "" for owner in owners)
        tensors = {name: p for name, p in self._run.merged.named_parameters() if name.startswith(owners)}
        record = {
            "layers": report.layers[self._lines :], "warnings": report.warnings[self._warnings :], "note": note,
        }  # fmt: skip
        self._kept.store(name, tensors, record)

    def _mark(self) -> None:
        self._lines, self._warnings = len(self._run.report.layers), len(self._run.report.warnings)

    def _read_data(self) -> None:
        """Once through the data, which the stages that are not solved again would have counted."""
        if not self._has_read:
            for _ in itertools.chain.from_iterable(self._examples):
                pass
        self._has_read = True

    # --- joint features ----------------------------------------------------------------------------------------------
    def restore_features(self, start: FeatureAssembly) -> FeatureAssembly | None:
        """The features that were chosen."""
        part = self._kept.load("features") if self._kept is not None else None
        if part is None:
            return None
        self._read_data()
        tensors, record = part
        stream = None
        if record["parents"]:
            places, device = range(record["parents"]), record["device"]
            into, back = ([tensors[f"{kind}{m}"].to(device) for m in places] for kind in ("into", "back"))
            stream = JointStream(into, back, record["lost"])
        chosen = {}
        for number, (space, writer, lost) in enumerate(record["chosen"]):
            parent, unit, written = (tensors[f"{part}{number}"] for part in ("parent", "unit", "written"))
            chosen[space] = ChosenUnits(parent, unit, writer, written, tensors.get(f"shift{number}"), lost)
        return replace(start, stream=stream, chosen=chosen)

    def store_features(self, assembly: FeatureAssembly) -> None:
        if self._kept is None:
            return
        stream = assembly.stream
        tensors: dict[str, Tensor] = {}
        for m in range(len(stream.into) if stream else 0):
            assert stream is not None
            tensors |= {f"into{m}": stream.into[m], f"back{m}": stream.back[m]}
        for number, chosen in enumerate(assembly.chosen.values()):
            tensors |= {f"parent{number}": chosen.parent, f"unit{number}": chosen.unit}
            tensors |= {f"written{number}": chosen.written} if chosen.written is not None else {}
            tensors |= {f"shift{number}": chosen.shift} if chosen.shift is not None else {}
        record = {
            "parents": len(stream.into) if stream else 0, "device": str(stream.into[0].device) if stream else "cpu",
            "chosen": [[space, chosen.writer, chosen.lost] for space, chosen in assembly.chosen.items()],
            "lost": dict(stream.lost) if stream else {},
        }  # fmt: skip
        self._kept.store("features", tensors, record)


def owners_of(stage: Stage) -> list[str]:
    """The modules whose weights a stage changes."""
    return [name if stage.kind == "norm" else name.rpartition(".")[0] for name in stage.names]
