"""PAPA (Jolicoeur-Martineau et al. 2023, arXiv 2304.03094): models trained side by side, each drawn to their mean.

    every n steps:  θ_j ← (1 − γ) θ_j + γ · 1/P Σ_i θ_i

γ = 0.01 every 10 steps is the paper's PAPA, γ = 1 every few epochs its PAPA-all. The members see other orders of the
data, other augmentation or other settings; at the end their mean is the model to use. Helps where training P models is
affordable: they stay close enough to average, and differ enough for it to be worth it.

The weights go through a folder: FOLDER/MEMBER/step-N.safetensors, written aside and then renamed, so that no member
ever reads half a file. Members are processes on one or several machines. Threads of one process work, too, if their
Trainers are made before any starts: accelerate, on which the Trainer rests, resets what all of them share.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor
from transformers import TrainerCallback

from isomerge import system
from isomerge.arguments import require_types
from isomerge.errors import CheckpointError, RequestError
from isomerge.training.weights import RunningMean, Weights, put_weights, weights_of

KEPT = 2
"""A member writes its next weights while the others may still be reading the last ones."""


class PopulationAverage(TrainerCallback):
    """Every `every` steps draws a member's weights towards the mean of all by the share `pull`.

    `folder` is the same for all members, `member` the name of this one, `members` how many there are. Each waits up to
    `wait` seconds until all have reached its step, so that the result does not depend on their speed. With `wait=0`
    it takes the latest weights of those that have written any. A member that crashed is started again from its last
    Trainer checkpoint; the others wait for it, and where they are ahead it takes the earliest later weights they still
    have. Every population needs a folder of its own; every member is one process.
    """

    def __init__(
        self,
        folder: str | Path,
        member: str,
        members: int,
        *,
        every: int = 10,
        pull: float = 0.01,
        wait: float = 600.0,
    ) -> None:
        require_types(
            folder=(folder, str, Path), member=(member, str), members=(members, int), every=(every, int),
            pull=(pull, float), wait=(wait, float),
        )  # fmt: skip
        if members < 1 or every < 1 or not 0 < pull <= 1 or wait < 0:
            raise RequestError(
                f"Averaging a population: members={members} and every={every} must be at least 1, pull={pull} in "
                f"(0, 1], wait={wait} not negative."
            )
        if Path(member).name != member or member in (".", ".."):
            raise RequestError(
                f"Averaging a population: member='{member}' cannot be the name of a folder.", keys=("member",)
            )
        self.folder, self.member, self.members = Path(folder), member, members
        self.every, self.pull, self.wait = every, pull, wait

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            raise RequestError(
                f"Averaging a population: this member is trained by {args.world_size} processes. Train each member in "
                "one process."
            )
        for step, path in self._written(self.member):
            if step > state.global_step:
                path.unlink()  # of a run that got further and crashed: it has to be made again

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._share(kwargs["model"], state.global_step)

    def _share(self, model: Any, step: int) -> None:
        own = weights_of(model)
        self._write(own, step)
        mean = self._mean(step, own)
        put_weights(model, {name: tensor.lerp(mean[name], self.pull) for name, tensor in own.items()})
        for _, path in sorted(self._written(self.member))[:-KEPT]:
            path.unlink()

    def _mean(self, step: int, own: Weights) -> Weights:
        """In the order of names, so that it is rounded alike for every member."""
        while True:
            mean = RunningMean()
            try:
                for path in self._latest() if self.wait == 0 else self._all_at(step):
                    mean.add(self._read(path, own))
            except FileNotFoundError:
                continue  # its member has written newer ones since
            return mean.weights

    # --- files --------------------------------------------------------------------------------------------------------
    def _write(self, weights: Weights, step: int) -> None:
        home = self.folder / self.member
        path = home / _name(step)
        aside = path.with_suffix(".partial")
        try:
            home.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(save(weights))
                system.sync(file)
            os.replace(aside, path)
        except OSError as error:
            raise CheckpointError(
                f"Writing the weights of '{self.member}' to {path}: {error.strerror or error}. Make room or choose "
                "another folder, and start the member again from its last checkpoint."
            ) from error

    def _read(self, path: Path, own: Weights) -> dict[str, Tensor]:
        found = load(path.read_bytes())
        other = [name for name in own.keys() | found.keys()
                 if name not in own or name not in found or own[name].shape != found[name].shape]  # fmt: skip
        if other:
            raise CheckpointError(
                f"Averaging a population: {path} and this member differ in '{min(other)}'. Train members of one "
                "architecture, and give every population a folder of its own."
            )
        return found

    def _written(self, member: str) -> Iterator[tuple[int, Path]]:
        """(step, file) of what a member has written, in no order."""
        for path in (self.folder / member).glob("step-*.safetensors"):
            with contextlib.suppress(ValueError):
                yield int(path.stem.removeprefix("step-")), path

    def _homes(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def _latest(self) -> list[Path]:
        """The last file of every member that has one."""
        return [max(files)[1] for home in self._homes() if (files := list(self._written(home)))]

    def _all_at(self, step: int) -> list[Path]:
        """The files of all members for a step, or the earliest after it, once they are there."""
        deadline = time.monotonic() + self.wait
        while True:
            reached = [[file for file in self._written(home) if file[0] >= step] for home in self._homes()]
            there = [min(files)[1] for files in reached if files]
            if len(there) == self.members:
                return there
            names = [path.parent.name for path in there]
            if len(there) > self.members:
                raise RequestError(
                    f"Averaging a population of {self.members} in {self.folder}: {', '.join(names)} are there. Give "
                    "every population a folder of its own, and every member the same number of members."
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Averaging a population in {self.folder}: after {self.wait:g} s only {', '.join(names)} of "
                    f"{self.members} members have reached step {step}. Start the others (again), with the same "
                    "every, or pass wait=0 to take what is there."
                )
            time.sleep(0.02)


def _name(step: int) -> str:
    return f"step-{step:09d}.safetensors"
