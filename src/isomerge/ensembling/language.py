"""Language models as one: their predictions are fused token by token, and `generate` is that of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin

from isomerge.data.base import Batch
from isomerge.ensembling.combinations import Combination, Shares
from isomerge.ensembling.combinations.posterior import beliefs
from isomerge.ensembling.members import home_of
from isomerge.ensembling.module import Ensemble
from isomerge.ensembling.other_tokens import other_vocabularies
from isomerge.ensembling.outputs import as_logs, joined
from isomerge.errors import RequestError
from isomerge.evaluation.tasks import logits_of
from isomerge.running.stock import StockModel


class MemberCaches(Cache):
    """The keys and values of all members, and what the posterior mixture has to remember of the text so far.

    Its layers are those of all members, so whatever reorders or repeats a cache does it to all of them.
    """

    def __init__(self, configs: Sequence[Any]) -> None:
        self.of = [DynamicCache(config=config) for config in configs]
        super().__init__(layers=[layer for cache in self.of for layer in cache.layers])
        self.belief: Tensor | None = None
        """(members, rows)"""
        self.last: Tensor | None = None
        """(members, rows, vocabulary): log-probabilities of the token that comes next."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._rows(lambda one: one.index_select(1, beam_idx.to(one.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(lambda one: one.repeat_interleave(repeats, 1))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda one: one[:, indices])

    def crop(self, tokens_to_remove: int) -> None:
        if self.belief is not None:
            raise RequestError(
                "Generating by the posterior mixture: it cannot take tokens back, as assisted decoding does. Leave the "
                "assistant out, or use another combination."
            )
        super().crop(tokens_to_remove)

    def _rows(self, chosen: Any) -> None:
        if self.belief is not None and self.last is not None:
            self.belief, self.last = chosen(self.belief), chosen(self.last)


class LanguageEnsemble(Ensemble, GenerationMixin):
    """Causal language models that write one text together, in the tokens of the first.

    `generate` is that of transformers: greedy, sampling, beam search. Members with another vocabulary read the text
    anew at every token, so generation has no cache where there are such.
    """

    # GenerationMixin asks its class for these, which PreTrainedModel has and a plain module does not.
    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(
        self, stock: Sequence[StockModel], task: str, combination: Combination, shares: Shares, tokenizer: Any = None
    ) -> None:
        super().__init__(stock, task, combination, shares)
        self.others = other_vocabularies(self.stock, tokenizer)
        self.notes += [other.match.note() for other in self.others.values()]
        own = getattr(self.members[0], "generation_config", None)
        self.generation_config = GenerationConfig.from_dict(own.to_dict()) if own else GenerationConfig()
        takes = [set(inspect.signature(member.forward).parameters) for member in self.members]
        self.takes_positions = ["position_ids" in names for names in takes]
        self.caches = not self.others and all("past_key_values" in names for names in takes)
        self.generation_config.use_cache = self.caches

    def can_generate(self) -> bool:
        return True

    def is_remote_code(self) -> bool:
        """Whether transformers should look for code beside it."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {"": "eager"}

    def set_experts_implementation(self, _implementation: Any) -> None:
        """Members keep theirs. Older versions of transformers change that of the first where it is on a GPU."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        if input_ids is None:
            raise RequestError("Running an ensemble of language models: pass input_ids.", keys=("input_ids",))
        if use_cache and not self.caches:
            raise RequestError(
                "Running an ensemble of language models with a cache: its members have different vocabularies, or "
                "keep no keys and values. Pass use_cache=False.",
                keys=("use_cache",),
            )
        caches = past_key_values if isinstance(past_key_values, MemberCaches) else None
        if use_cache and caches is None:
            caches = MemberCaches([member.config for member in self.members])
        batch = {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})
        outputs: list[Any] = []
        for place, one in enumerate(self.stock):
            if place in self.others:
                continue
            own: dict[str, Any] = {**self._at(batch, one), "use_cache": bool(use_cache)}
            if position_ids is not None and self.takes_positions[place]:
                own["position_ids"] = position_ids.to(home_of(one))
            outputs.append(one.run(own | ({"past_key_values": caches.of[place]} if caches is not None else {})))
        logits = self.join(self._with_others([logits_of(output) for output in outputs], batch), batch, caches)
        return self._as_stock(outputs[0], logits, labels, past_key_values=caches)

    def member_logits(self, batches: Sequence[Batch]) -> list[Tensor]:
        own = [
            logits_of(one.run(batch))
            for place, (one, batch) in enumerate(zip(self.stock, batches, strict=True))
            if place not in self.others
        ]
        return self._with_others(own, batches[0])

    def _with_others(self, logits: list[Tensor], batch: Batch) -> list[Tensor]:
        for place, other in self.others.items():
            logits.insert(place, other.logits(batch["input_ids"], batch.get("attention_mask"), logits[0]))
        return logits

    def join(self, logits: Sequence[Tensor], batch: Batch, caches: MemberCaches | None = None) -> Tensor:
        """As of every ensemble; the posterior mixture reads the tokens of the batch, and goes on from the cache."""
        if not self.combination.reads:
            return super().join(logits, batch)
        logs = torch.stack([as_logs(one.to(logits[0].device), self.kind) for one in logits])
        belief = self._believed(logs, batch["input_ids"], batch.get("attention_mask"), caches)
        if caches is not None:
            caches.belief, caches.last = belief[..., -1], logs[:, :, -1]
        return joined(list(logs), self.kind, self.combination, replace(self.shares, beliefs=belief))

    def _believed(self, logs: Tensor, ids: Tensor, mask: Tensor | None, caches: MemberCaches | None) -> Tensor:
        """(members, rows, tokens): the logarithm of the posterior after each token."""
        members, rows, length, _ = logs.shape
        ids = ids.to(logs.device)
        heard = logs.new_zeros(members, rows, length, dtype=torch.float64)
        asked = ids[None, :, :, None].expand(members, -1, -1, 1)
        heard[:, :, 1:] = logs[:, :, :-1].gather(-1, asked[:, :, 1:])[..., 0].double()
        if mask is not None:  # what is padding, or comes first after it, nobody has predicted
            real = mask.to(logs.device)[:, -length:].bool()
            heard[:, :, 1:] = heard[:, :, 1:].where(real[:, 1:] & real[:, :-1], 0)
        prior = self.shares.weights.log().to(logs.device)[:, None].expand(-1, rows)
        if caches is not None and caches.belief is not None and caches.last is not None:
            prior = caches.belief
            heard[:, :, 0] = caches.last.gather(-1, asked[:, :, 0])[..., 0].double()
        return beliefs(heard, prior)

    def readers(self) -> Sequence[StockModel]:
        return [one for place, one in enumerate(self.stock) if place not in self.others]

    def of_readers(self, batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        own = iter(batches)
        return tuple(batches[0] if place in self.others else next(own) for place in range(len(self.stock)))

    def _supports_default_dynamic_cache(self) -> bool:  # type: ignore[override]
        return self.caches
