"""The model's tables in the new vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.merging.plan.model_parts import HEAD, ModelParts, read_build
from isomerge.merging.transplanting.matched import NewTokens
from isomerge.merging.transplanting.matching_pursuit import matching_pursuit

AT_ONCE = 256
"""Tokens whose rows are found together."""


@dataclass(frozen=True)
class ModelTables:
    """The vocabulary's tensors of one checkpoint, by name on disk."""

    checkpoint: Checkpoint
    build: ModelParts
    input: str
    output: str | None
    """None: it is tied to the input, or there is none."""

    @property
    def rows(self) -> int:
        return self.checkpoint.tensors[self.input].shape[0]

    @property
    def all(self) -> list[str]:
        """With biases of the output."""
        return [name for name in self.checkpoint.tensors if self.build.is_vocabulary(name)]

    def of(self, output: bool) -> str:
        return self.output if output and self.output is not None else self.input


def read_tables(checkpoint: Checkpoint) -> ModelTables:
    """By headers; raise where there is no table of tokens."""
    build = read_build(checkpoint)
    if build.table is None:
        raise RequestError(
            f"Transplanting: {checkpoint.name} has no table of token embeddings that is known by its name. Use a "
            "language model."
        )
    heads = [name for name in checkpoint.tensors if HEAD.search(name) and build.is_vocabulary(name)]
    heads = [name for name in heads if len(checkpoint.tensors[name].shape) == 2]
    return ModelTables(checkpoint, build, build.table, heads[0] if heads else None)


class NewRows:
    """Makes the rows of one table after the other."""

    def __init__(self, tokens: NewTokens, model: ModelTables, donor: ModelTables, how: str, most: int, device: str):
        self._tokens, self._model, self._donor, self._how, self._most = tokens, model, donor, how, most
        self._device = device
        self.missed: dict[str, float] = {}
        """By table: the mean over new tokens of ‖e − Σ α_s e_s‖ / ‖e‖ in the donor's table, for omp."""

    def table(self, name: str) -> Tensor:
        """One of the model's tables in the new vocabulary, in the precision it was computed in."""
        old = self._model.checkpoint.read(name)
        wide = torch.promote_types(old.dtype, torch.float32)
        old = old.to(wide)
        flat = old.reshape(-1) if old.dim() == 1 or old.shape[0] == 1 else old  # biases, also of shape (1, tokens)
        found = flat.new_zeros(self._tokens.size, *flat.shape[1:])
        ids, known = (torch.tensor(list(one)) for one in (self._tokens.kept.keys(), self._tokens.kept.values()))
        found[ids] = flat[known]
        new = list(self._tokens.pieces)
        if new and flat.dim() == 1:
            found[new] = flat[known].mean()
        elif new:
            found[new] = self._rows(name, flat, new)
        blank = self._tokens.blank
        if blank.any():  # so that padding is an unremarkable row
            found[blank] = found[~blank].double().mean(0).to(wide)
        return found.reshape(1, -1) if old.dim() == 2 and old.shape[0] == 1 else found

    def _rows(self, name: str, old: Tensor, new: Sequence[int]) -> Tensor:
        if self._how == "zero":
            return old.new_zeros(len(new), old.shape[1])
        if self._how == "mean":
            return old.mean(0).expand(len(new), -1)
        if self._how == "subword":
            mean = old.mean(0)
            pieces = (self._tokens.pieces[id] for id in new)
            return torch.stack([old[own].mean(0) if own else mean for own in pieces])
        donor_name = self._donor.of(name == self._model.output)
        donor = self._donor.checkpoint.read(donor_name).to(old.dtype)
        if self._how == "stored":
            if donor.shape[1] != old.shape[1]:
                raise RequestError(
                    f"Transplanting: stored takes rows as {self._donor.checkpoint.name} has them, which are "
                    f"{donor.shape[1]} numbers wide, and those of {self._model.checkpoint.name} are {old.shape[1]}. "
                    "Choose omp or subword.",
                    keys=("how",),
                )
            return donor[list(new)]
        return self._pursued(name, old, donor, new)

    def _pursued(self, name: str, old: Tensor, donor: Tensor, new: Sequence[int]) -> Tensor:
        """Rows of new tokens as combinations of shared ones: found in the donor's table, applied to the model's."""
        donor_ids, own_ids = list(self._tokens.kept.keys()), list(self._tokens.kept.values())
        atoms, own = donor[donor_ids].to(self._device), old[own_ids].to(self._device)
        rows, missed = [], 0.0
        for start in range(0, len(new), AT_ONCE):
            targets = donor[list(new[start : start + AT_ONCE])].to(self._device)
            chosen, coefficients = matching_pursuit(targets, atoms, self._most)
            rows.append(torch.einsum("ts,tsd->td", coefficients, own[chosen]).cpu())
            left = targets - torch.einsum("ts,tsd->td", coefficients, atoms[chosen])
            norms = torch.linalg.vector_norm(targets, dim=1).clamp_min(1e-30)
            missed += float((torch.linalg.vector_norm(left, dim=1) / norms).sum())
        self.missed[name] = missed / len(new)
        return torch.cat(rows)
