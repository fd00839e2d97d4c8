"""A parent with another vocabulary, in terms of the first model's: its tables, its predictions, and its features.

Tokens are matched by their text. A token t of the first model is, to the other, the pieces of its text; what the other
predicts next is the first of them, β(t). So its next-token distribution p says how likely each group {t: β(t) = b} is,
and within a group the first model's own distribution f decides:

    q(t) = p(β(t)) · f(t) / Σ_{β(t') = β(t)} f(t')

A token b that begins no token of the first model counts for the first piece of its own text there. Where the first
model has read some text x more than the other, the same holds for x + t, given that the other's next token is longer
than x. Tokens without a text of their own (half a character) are matched by name, special ones by their role; the first
model keeps what it says of those that have no match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batch
from isomerge.data.parallel import PENDING, PLACES, PendingTexts, part, read_by
from isomerge.data.tokenizer import tokenizer_for
from isomerge.errors import RequestError
from isomerge.merging.vocabulary.files import declared_rows, has_tokenizer, other_ids
from isomerge.running.call_recorder import WeightCall

BEFORE = "\n"
"""Put before a text that is cut into tokens: in the middle of a line, some tokenizers would add a space."""
LEAST = 1e-9
"""What every token of a group counts at least."""


# --- one vocabulary ---------------------------------------------------------------------------------------------------
class TokenTexts:
    """A tokenizer, seen through the texts of its tokens."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Any, rows: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise _refused(f"the tokenizer of {checkpoint.name} does not say where in a text its tokens are")
        self.rows, self._backend = rows, tokenizer.backend_tokenizer
        self.names = {id: name for name, id in tokenizer.get_vocab().items() if id < rows}
        self.roles = {
            role: id
            for role, name in tokenizer.special_tokens_map.items()
            if isinstance(name, str) and (id := tokenizer.convert_tokens_to_ids(name)) is not None and id < rows
        }
        special = set(tokenizer.all_special_ids)
        ids = [id for id in self.names if id not in special]
        before = self._backend.encode(BEFORE, add_special_tokens=False).ids
        decoded = self._backend.decode_batch([[*before, id] for id in ids], skip_special_tokens=False)
        start = len(self._backend.decode(before, skip_special_tokens=False))
        texts = {id: text[start:] for id, text in zip(ids, decoded, strict=True)}
        self.texts = {id: text for id, text in texts.items() if text and "\ufffd" not in text}
        """Those that are special or no whole characters have none."""

    @cached_property
    def by_text(self) -> dict[str, int]:
        return {text: id for id, text in sorted(self.texts.items(), reverse=True)}

    @cached_property
    def by_letter(self) -> dict[str, list[int]]:
        """By the first one."""
        found: dict[str, list[int]] = {}
        for id, text in self.texts.items():
            found.setdefault(text[0], []).append(id)
        return found

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {name: id for id, name in self.names.items()}

    def pieces(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """The tokens of every text, each with the number of characters at which it ends."""
        found = []
        for encoding in self._backend.encode_batch([BEFORE + text for text in texts], add_special_tokens=False):
            ends = [(id, end - len(BEFORE)) for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True)]
            found.append([(id, end) for id, end in ends if end > 0 and id < self.rows])
        return found


# --- two --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenGroups:
    """What each token of the first model is to the other, once some text is pending."""

    group: Tensor
    """(first): β, or `kept` where nothing is known, or `kept` + 1 where the other rules the token out."""
    alone: Tensor
    """Tokens of the other that are β of none."""
    lands: Tensor
    """… and those of the first that they count for."""
    kept: int

    def carried(self, own: Tensor, first: Tensor) -> Tensor:
        """Probabilities (rows, tokens) of the other and of the first -> of the other, over the tokens of the first."""
        device, prior = own.device, first + LEAST
        group, alone, lands = self.group.to(device), self.alone.to(device), self.lands.to(device)
        sums = torch.zeros(len(own), self.kept + 2, dtype=prior.dtype, device=device).index_add_(1, group, prior)
        known = torch.zeros(self.kept, dtype=torch.bool, device=device)
        known[group[group < self.kept]] = True
        known[alone] = True
        mass = own * known
        total = mass.sum(1, keepdim=True)
        kept = first @ (group == self.kept).to(first)
        mass = mass / total.clamp_min(LEAST) * (1 - kept[:, None])
        share = torch.cat([mass, kept[:, None], torch.zeros_like(kept[:, None])], 1) / sums.clamp_min(1e-30)
        found = (prior * share[:, group]).index_add_(1, lands, mass[:, alone])
        return torch.where(total > LEAST, found, first)


@dataclass
class TokenMatch:
    """The vocabulary of a parent beside that of the first model."""

    first: TokenTexts
    other: TokenTexts
    name: str
    pending: PendingTexts
    _groups: dict[int, TokenGroups] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> list[list[int]]:
        """For each token of the first model those of the other that are its text, or the one that is its like."""
        roles = {id: self.other.roles[role] for role, id in self.first.roles.items() if role in self.other.roles}
        found: list[list[int]] = [[] for _ in range(self.first.rows)]
        unknown = []
        for id, name in self.first.names.items():
            text = self.first.texts.get(id)
            named = self.other.by_name.get(name)
            if named is not None and self.other.texts.get(named) != text:
                named = None
            like = named if named is not None else self.other.by_text.get(text) if text else roles.get(id)
            if like is not None:
                found[id] = [like]
            elif text:
                unknown.append(id)
        for id, pieces in zip(unknown, self.other.pieces([self.first.texts[id] for id in unknown]), strict=True):
            found[id] = [piece for piece, _ in pieces]
        return found

    @property
    def shared(self) -> int:
        """How many tokens both vocabularies have."""
        return sum(self.like(id) is not None for id in range(self.first.rows))

    def summary(self) -> dict[str, Any]:
        """For the report."""
        known = [len(pieces) for pieces in self.pieces]
        return {
            "model": self.name, "tokens": self.other.rows, "first": self.first.rows, "shared": self.shared,
            "pieces": sum(count > 0 for count in known) - self.shared, "unmatched": known.count(0),
        }  # fmt: skip

    def note(self) -> str:
        about = self.summary()
        return (
            f"{self.name} has a vocabulary of its own: {about['shared']} of the {about['first']} tokens of the first "
            f"model are among its {about['tokens']}, {about['pieces']} are several of them, {about['unmatched']} have "
            "no match. Each model reads the texts in its own tokens, and predictions are carried to the first one's"
        )

    def like(self, id: int) -> int | None:
        """The other's token with the same text, name or role."""
        pieces = self.pieces[id]
        return pieces[0] if len(pieces) == 1 and self._is_like(id, pieces[0]) else None

    def _is_like(self, id: int, other: int) -> bool:
        return self.first.texts.get(id) == self.other.texts.get(other)

    def rows(self, table: Tensor, *, output: bool) -> Tensor:
        """A table of the other model, row by row for the tokens of the first: of its pieces' inputs the last one, as
        the stream is that after the last; of its outputs the first, which is what comes next. The mean of all rows
        stands for a token that has none."""
        table = table[: self.other.rows]
        place = 0 if output else -1
        at = torch.tensor([pieces[place] if pieces else -1 for pieces in self.pieces], device=table.device)
        found = table[at.clamp_min(0)]
        found[at < 0] = table.mean(0)
        return found

    # --- predictions --------------------------------------------------------------------------------------------------
    def carried(self, own: Tensor, first: Tensor, pending: Tensor) -> Tensor:
        """As `TokenGroups.carried`, row by row as text is pending; where that cannot be named the first model stays."""
        found = first.clone()
        for number in pending.unique().tolist():
            if number >= 0:
                at = pending == number
                found[at] = self.groups(number).carried(own[at][:, : self.other.rows], first[at])
        return found

    def groups(self, number: int) -> TokenGroups:
        if number not in self._groups:
            self._groups[number] = self._after(self.pending.texts[number])
        return self._groups[number]

    def _after(self, text: str) -> TokenGroups:
        kept, length = self.other.rows, len(text)
        rests = {b: t[length:] for b, t in self.other.texts.items() if len(t) > length and t.startswith(text)}
        if text:
            group = torch.full((self.first.rows,), kept)
            group[list(self.first.texts)] = kept + 1
            ids = [id for letter in {rest[0] for rest in rests.values()} for id in self.first.by_letter.get(letter, [])]
            begun = self.other.pieces([text + self.first.texts[id] for id in ids])
            for id, cut in zip(ids, begun, strict=True):
                group[id] = cut[0][0] if cut and cut[0][1] > length else kept + 1
        else:
            group = torch.tensor([pieces[0] if pieces else kept for pieces in self.pieces])
        found = set(group.tolist())
        alone = [b for b in rests if b not in found]
        lands = self.first.pieces([rests[b] for b in alone])
        pairs = [(b, cut[0][0]) for b, cut in zip(alone, lands, strict=True) if cut]
        into = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return TokenGroups(group, into[:, 0], into[:, 1], kept)


@dataclass(frozen=True)
class OwnTokens:
    """How a model of the merge reads batches: with its own tokens, and what it gives is put in place of the first's."""

    who: int
    """Its place among the models."""
    match: TokenMatch | None = None
    """None: it has the vocabulary of the first."""

    def install(self, model: nn.Module) -> None:
        """The model takes its own tokens out of whatever batch it is given."""
        model.register_forward_pre_hook(lambda _, args, batch: (args, read_by(batch, self.who)), with_kwargs=True)

    def placed(self, tensor: Tensor, batch: Batch) -> Tensor:
        """(…, width) at the model's own tokens -> at those of the first; what has no tokens stays."""
        own = batch[part("input_ids", self.who)] if self.match is not None else None
        if own is None or tensor.numel() != own.numel() * tensor.shape[-1]:
            return tensor
        rows = tensor.reshape(*own.shape, -1)
        at = batch[part(PLACES, self.who)]
        return rows.gather(1, at[:, :, None].expand(-1, -1, rows.shape[2]))

    def call(self, call: WeightCall, batch: Batch, output: bool) -> WeightCall:
        """The same of all that a map or norm reads and gives. `output`: it gives scores of tokens."""
        if self.match is None:
            return call
        given, sum_ = self.placed(call.output, batch), self.placed(call.sum, batch)
        if output:
            given = sum_ = self.match.rows(given.movedim(-1, 0), output=True).movedim(0, -1)
        return replace(call, input=self.placed(call.input, batch), output=given, sum=sum_)

    def scores(self, own: Tensor, first: Tensor, batch: Batch) -> Tensor:
        """Scores of the model at its own tokens, and of the first at its: of the model, for the first one's tokens."""
        if self.match is None:
            return own
        placed = self.placed(own, batch)
        if own.dim() < 3 or first.shape[-1] != self.match.first.rows:
            return placed
        own, first_one = (scores.flatten(0, 1).softmax(-1) for scores in (placed, first))
        return self.match.carried(own, first_one, self.pending(batch)).log().reshape(first.shape)

    def pending(self, batch: Batch) -> Tensor:
        """(rows,): as `PendingTexts` counts."""
        return batch[part(PENDING, self.who)].flatten()


# --- which models -----------------------------------------------------------------------------------------------------
def find_matches(models: Sequence[Checkpoint]) -> dict[int, TokenMatch]:
    """The models whose vocabulary is not that of the first, by place."""
    others = of_other_tokens(models)
    if not others:
        return {}
    sizes = [declared_rows(model.config) for model in models]
    pending = PendingTexts()
    read = {m: TokenTexts(models[m], tokenizer_for(models[m]), sizes[m] or 0) for m in [0, *others]}
    return {m: TokenMatch(read[0], read[m], models[m].name, pending) for m in others}


def of_other_tokens(models: Sequence[Checkpoint]) -> list[int]:
    """The places of models whose vocabulary is not that of the first; each must have its tokenizer."""
    sizes = [declared_rows(model.config) for model in models]
    others = [
        m
        for m in range(1, len(models))
        if sizes[m] is not None and (sizes[m] != sizes[0] or other_ids([models[0], models[m]]))
    ]
    if not others or sizes[0] is None:
        return []
    for m in [0, *others]:
        if not has_tokenizer(models[m]):
            raise _refused(f"{models[m].name}, of {sizes[m]} tokens, has no tokenizer beside it")
    return others


def _refused(why: str) -> RequestError:
    return RequestError(
        f"Matching tokens: the vocabularies of the models differ, and {why}. Put tokenizer.json and "
        "tokenizer_config.json of the model into its folder.",
        keys=("models",),
    )
