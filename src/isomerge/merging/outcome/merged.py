"""A merged model: computed tensor by tensor when it is written or asked for."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge import system
from isomerge.addresses import is_url
from isomerge.checkpoint import Checkpoint, TensorInfo, Written, parse_dtype, refuse_overwrite
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.dtypes import dtype_entry, dtype_name
from isomerge.checkpoint.identity import require_unchanged
from isomerge.checkpoint.kept import KeptWork
from isomerge.checkpoint.memory import MemoryCheckpoint, load_into_module, require_config
from isomerge.checkpoint.side_files import side_files_of
from isomerge.checkpoint.writer import CheckpointWriter, counted
from isomerge.engine import Engine, Threads
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.verify import verify as verify_folder
from isomerge.merging.outcome.files import card_files, lock_text, record_files, resume_key, side_files
from isomerge.merging.outcome.notes import name_narrowed
from isomerge.merging.outcome.relations import InputRelations
from isomerge.merging.plan.tensor_plan import RecipePlan
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe_data import DataSet
from isomerge.merging.regression import one_shortage_warning
from isomerge.merging.run.jobs import Job, run
from isomerge.merging.run.memory import Room, fitting_threads, in_flight, job_memory
from isomerge.merging.run.sources import InputHashes
from isomerge.merging.vocabulary import Vocabulary
from isomerge.progress_bars import stops_bar
from isomerge.reporting.page import finish_report
from isomerge.results import Result, plain
from isomerge.threads import ahead, thread_count


@dataclass
class MergeReport(Result):
    """The record of a merge. What a method for whole models tells beside its result comes first in `to_dict()`."""

    method: str
    models: list[str]
    donor: str
    """The model whose config and side files the result has."""
    aligned: bool
    alignment: dict[str, Any] | None
    vocabulary: dict[str, Any] | None
    data: list[dict[str, Any]]
    """What models were run on."""
    threads: int
    peak_memory_bytes: int
    """The largest resident size of the program, mapped files and libraries included."""
    peak_anonymous_bytes: int | None
    """The most it had allocated while it wrote, seen twenty times a second; None where the system does not tell."""
    notes: list[str]
    seconds: float
    _details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self._details), **super().to_dict()}


@dataclass
class Merged:
    """The result of `isomerge.merge`. Nothing is computed until `save`, `state_dict` or `load_into`."""

    recipes: list[Recipe]
    """All documents; the last is the one whose result this is."""
    inputs: Mapping[str, Checkpoint]
    """By the reference under which the recipe names them; files that options name are among them."""
    donor: Checkpoint
    """Whose config and side files the result has."""
    jobs: list[Job]
    tensor_plans: RecipePlan
    """Where every tensor and option of the last document comes from."""
    files: frozenset[str] = frozenset()
    """The inputs that are no models: statistics, importances, masks."""
    config_changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    strangers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a model, those merged with it as they are that have nothing in common with it, with their cosines."""
    alignment: dict[str, Any] | None = None
    data: list[DataSet] = field(default_factory=list)
    """What models were run on, in all documents."""
    details: dict[str, Any] = field(default_factory=dict)
    """What a method for whole models tells beside its result."""
    vocabulary: Vocabulary | None = None
    chat_template: str | None = None
    hashes: InputHashes = field(default_factory=InputHashes)
    seed: int = 0
    device: str = "cpu"
    engine: Engine = field(default_factory=Threads)
    threads: int | None = None
    max_memory: int | str | None = None
    progress: Progress | None = None
    started: float = field(default_factory=time.perf_counter)
    seconds: float | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    """What `verify` asked of the written folder, and the answers."""
    _peak_anonymous: int | None = None
    kept: KeptWork | None = None
    """Where what was solved on the way is kept for a call that is made again."""
    _vanished: dict[str, int] = field(default_factory=dict)
    _narrowed: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Merged({', '.join(self.models)}, method {self.recipe.merge_method}, {len(self.jobs)} tensors)"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "progress": None}  # who watches here does not watch there

    @property
    def recipe(self) -> Recipe:
        return self.recipes[-1]

    @property
    def models(self) -> list[str]:
        """What is merged, and the base."""
        return [name for name in self.inputs if name not in self.files]

    @property
    def plan(self) -> dict[str, TensorInfo]:
        """Names, shapes and dtypes of the result."""
        return {job.name: job.info for job in self.jobs}

    @property
    def config(self) -> dict[str, Any]:
        return {**self.donor.config, **self.config_changes}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Merged tensors in the written dtype, one at a time, under their names on disk."""
        for job, tensor in zip(self.jobs, ahead(Job.tensor, self.jobs, self.threads), strict=True):
            if tensor.is_floating_point():
                tensor, lost = job.rounded(tensor)
                self._vanished[job.name] = lost.underflow
            yield job.name, tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The whole result in memory."""
        with one_shortage_warning():
            return dict(self.tensors())

    def as_checkpoint(self) -> Checkpoint:
        """The model that `save` would write, in memory, with the tokenizer and image settings it would have."""
        owner = MergedCheckpoint(self, f"the merge of {len(self.models)} models")
        return MemoryCheckpoint(owner.name, self.state_dict(), self.config, beside=owner)

    def load_into(self, module: nn.Module) -> nn.Module:
        """Put the merged weights into a module of the same architecture, in place, and return it."""
        require_config(module, self.config_changes)
        load_into_module(module, self.state_dict())
        return module

    @stops_bar
    def save(
        self,
        out: str | Path,
        *,
        shard_size: int | str = "5GB",
        out_dtype: str | torch.dtype | None = None,
        force: bool = False,
        lock: bool = True,
        report: bool = True,
        copy_tokenizer: bool = True,
        finish: bool = True,
    ) -> Written:
        """Write the merged model with the donor's config and side files; without `copy_tokenizer`, the tokenizer is
        written only if the recipe makes a new one. `out` is a folder, or a URL (s3://, gs://) that one is uploaded to.

        `lock` hashes every input and output tensor into isomerge.lock.json; `report` writes the model card, and what
        `isomerge report` needs into isomerge.json. A run that was killed or interrupted continues from its
        finished tensors when the same call is made again; with `finish=False` also after the model is complete, until
        `Written.finish()` is called. An input that changes in the meantime is an error, and nothing is written.
        """
        paths = [data.settings.path for data in self.data if not data.in_memory]
        refuse_overwrite(out, [*self.inputs.values(), self.donor, *paths])
        if is_url(out):
            from isomerge.checkpoint.upload import save_to_url

            return save_to_url(
                self.save, out, force=force, progress=self.progress, shard_size=shard_size, out_dtype=out_dtype,
                lock=lock, report=report, copy_tokenizer=copy_tokenizer,
            )  # fmt: skip
        require_unchanged(self.inputs.values(), Path(out))
        out_dtype = dtype_name(out_dtype)
        jobs, changes = self._in_dtype(out_dtype)
        self._narrowed = name_narrowed(self) if out_dtype is None else []
        plan = {job.name: job.info for job in jobs}
        self.hashes.wanted = lock
        threads: int | None = fitting_threads(jobs, self.threads, self.max_memory)
        if self.engine.name != "threads":  # the budget is each worker's own, and Ray knows how many there are
            threads = self.threads
        options: dict[str, Any] = {"shard_size": str(shard_size), "out_dtype": out_dtype}
        options |= {} if copy_tokenizer else {"copy_tokenizer": False}
        tell = counted(self.progress, plan, f"writing {Path(out).name}")
        comparison = InputRelations(self)
        with side_files(self, tokenizer=copy_tokenizer) as copies:
            key = resume_key(self, plan, copies, {**options, "hashed": lock, "report": report})
            writer = CheckpointWriter(
                out, plan, config={**self.config_changes, **changes}, donor=self.donor, copies=copies,
                shard_size=shard_size, force=force, key=key, finish=finish, inputs=self.inputs.values(),
                hashed=lock,
                solved=self.kept.key if self.kept is not None and self.kept.out == Path(out).expanduser() else None,
            )  # fmt: skip
            with writer:
                if writer.written is None:
                    looking: dict[str, Any] = {"look": comparison.look, "looked": comparison.take} if report else {}
                    with system.PeakOfAnonymous() as peak:
                        run(
                            jobs, writer, engine=self.engine, threads=threads, hashing=lock, hashes=self.hashes,
                            progress=tell, holding=self._holding(), memory=job_memory, visible=self._folders(),
                            **looking,
                        )  # fmt: skip
                    self._peak_anonymous = peak.bytes
                self._vanished = {name: lost.underflow for name, lost in writer.lost.items() if lost.underflow}
                written = writer.written or self._completed(writer, comparison, jobs, options, lock, report)
        if self.kept is not None and self.kept.out != written.out:
            self.kept.discard()
        self.seconds = time.perf_counter() - self.started
        return written

    def _folders(self) -> list[Path]:
        """What every worker has to see."""
        return [checkpoint.folder for checkpoint in self.inputs.values() if checkpoint.folder is not None]

    def _holding(self) -> Callable[[Job], AbstractContextManager[None]]:
        """What all workers hold together is bounded, however many they are."""
        room = Room(in_flight(self.max_memory))
        return lambda job: room.taken(job_memory(job))

    def _completed(
        self,
        writer: CheckpointWriter,
        comparison: InputRelations,
        jobs: list[Job],
        options: dict[str, Any],
        lock: bool,
        report: bool,
    ) -> Written:
        """Add what is written beside the weights, and make it a model."""
        if lock:
            writer.add("isomerge.lock.json", lock_text(self, writer, options).encode())
        if report:
            files = card_files(self, writer, writer.sha256())
            files |= record_files(self, comparison.record(jobs), writer.sha256())
            for name, text in files.items():
                writer.add(name, text.encode())
        writer.stage()
        require_unchanged(self.inputs.values(), writer.out, [path for one in self.data for path in one.data.changed()])
        return writer.commit()

    def verify(self, written: Written) -> bool:
        """Check that the output is complete, has the structure of its class and rows for all tokens; raise if not."""
        record = verify_folder(written.out, deep=False, same_structure_as=self.donor, threads=self.threads)
        self.checks = record["checks"]
        if record["problems"]:
            raise CheckpointError(
                f"While verifying {written.out}: {'; '.join(record['problems'])}. The folder is left to be looked at."
            )
        return True

    def write_report(self, written: Written) -> Path | None:
        """Write report.html beside the weights, with what this run took and found; None where jinja2 is missing."""
        if written.url is not None:
            raise RequestError(
                f"Writing the report of {written.url}: report.html is written beside a model in a folder. Save to a "
                "folder, write the report, then upload both; or use `isomerge merge`, which does all of it."
            )
        report = self.report()
        run = {
            "seconds": report.seconds, "peak_memory_bytes": report.peak_memory_bytes,
            "peak_anonymous_bytes": report.peak_anonymous_bytes, "threads": report.threads,
            "device": self.device, "tensors": written.tensors, "bytes": written.bytes, "checks": self.checks,
        }  # fmt: skip
        return finish_report(written.out, run)

    def _in_dtype(self, out_dtype: str | None) -> tuple[list[Job], dict[str, Any]]:
        """The jobs for another written dtype, and what that changes in config.json."""
        if out_dtype is None:
            return self.jobs, {}
        dtype = parse_dtype(out_dtype)
        jobs = [
            replace(job, info=TensorInfo(job.info.shape, dtype)) if job.info.dtype.is_floating_point else job
            for job in self.jobs
        ]
        return jobs, dtype_entry(self.config, dtype)

    def report(self) -> MergeReport:
        """What was merged, how, and what it took."""
        notes = [*self.notes, *self._narrowed]
        gone = {name: count for name, count in sorted(self._vanished.items()) if count}
        notes += [f"{name}: {count} values became zero in the written dtype" for name, count in gone.items()]
        return MergeReport(
            method=self.recipe.merge_method,
            models=self.models,
            donor=self.donor.name,
            aligned=self.alignment is not None,
            alignment=self.alignment,
            vocabulary=self.vocabulary.report if self.vocabulary else None,
            data=[data.record() for data in self.data],
            threads=thread_count(self.threads),
            peak_memory_bytes=system.peak_memory(),
            peak_anonymous_bytes=self._peak_anonymous,
            notes=notes,
            seconds=self.seconds if self.seconds is not None else time.perf_counter() - self.started,
            _details=self.details,
        )


class MergedCheckpoint(Checkpoint):
    """The result as the input of another merge: computed when it is read, and never rounded on the way."""

    def __init__(self, merged: Merged, name: str) -> None:
        self.name, self.config, self.folder, self.revision = name, merged.config, merged.donor.folder, None
        self._merged = merged
        self.jobs = {job.name: job for job in merged.jobs}
        self.tensors = {name: self.jobs[name].info for name in sorted(self.jobs)}
        self._files = _own_files(merged) if _has_own_files(merged) else None
        if self._files is not None:
            self.folder = Path(self._files.name)
        self._last = threading.local()  # each worker reads one tensor in blocks; what it holds is its own

    def __reduce__(self) -> tuple[Any, ...]:
        return MergedCheckpoint, (self._merged, self.name)

    def read(self, name: str) -> Tensor:
        if name not in self.jobs:
            self.unknown_tensor(name)
        job = self.jobs[name]
        tensor = job.tensor()
        # An intermediate dtype that the recipe asks for is obeyed; without one nothing is rounded.
        asked = self._merged.recipe.asked_dtype
        return tensor.to(job.info.dtype) if asked and tensor.is_floating_point() else tensor

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if getattr(self._last, "name", None) != name:
            self._last.name, self._last.tensor = name, self.read(name)
        tensor: Tensor = self._last.tensor
        return tensor[start:stop] if tensor.dim() > 1 else tensor

    def identity(self) -> Any:
        return {ref: checkpoint.identity() for ref, checkpoint in sorted(self._merged.inputs.items())}

    def side_files(self) -> list[Path]:
        if self._files is not None:
            return side_files_of(Path(self._files.name))
        return self._merged.donor.side_files()

    def forget(self) -> None:
        """Let go of the tensor this thread has read last."""
        self._last.name = self._last.tensor = None


def _has_own_files(merged: Merged) -> bool:
    return bool(merged.vocabulary or merged.chat_template or merged.tensor_plans.tokens_of)


def _own_files(merged: Merged) -> tempfile.TemporaryDirectory[str]:
    """A folder with the tokenizer that belongs to the merged tables: the donor's would name other rows."""
    folder = tempfile.TemporaryDirectory(prefix="isomerge-")
    with side_files(merged) as files:
        for name, path in files.items():
            target = Path(folder.name) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (Path(folder.name) / "config.json").write_text(json.dumps(merged.config), encoding="utf-8")
    return folder
