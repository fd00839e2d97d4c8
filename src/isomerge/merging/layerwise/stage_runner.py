"""Running the merged model and its parents over the calibration data, up to the point a stage needs and no further."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.data.base import Batch
from isomerge.errors import IsomergeError
from isomerge.merging.layerwise.stages import Stage
from isomerge.merging.layerwise.token_matching import OwnTokens
from isomerge.running.blocks import BlockCache, BlockIndex
from isomerge.running.call_recorder import CallRecorder, ForwardDone, RecordedWeights, WeightCall


class StageRunner:
    """One model with its cache: `run` gives the calls a stage asks for."""

    def __init__(self, model: Any, name: str, who: int, cache: BlockCache, tokens: OwnTokens | None = None) -> None:
        """`tokens`: how it reads the data, where the models' vocabularies differ."""
        self.model, self.name, self._who = model, name, who
        self._cache, self.tokens = cache, tokens or OwnTokens(0)

    def going_on(self, number: int, place: BlockIndex) -> contextlib.AbstractContextManager[None]:
        """Run the model on batch `number` without the blocks before `place` whose outcome is known."""
        return self._cache.going_on(self.model, self._who, number, place)

    def linear_weight(self, name: str, transposed: bool) -> Tensor:
        """A linear map as (in, out), whichever way round it is stored."""
        weight: Tensor = self.model.get_parameter(name).detach()
        return weight if transposed else weight.T

    def last_block(self, name: str) -> str:
        """The block after which the stream is that of the merged model after the block of this name."""
        return name

    def run(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        number: int,
        routing: ExpertRouting | None = None,
        place: BlockIndex | None = None,
    ) -> dict[Stage, list[WeightCall]]:
        """The calls each stage asks for, from one forward pass that ends as soon as all are there. Nothing before
        `place` is asked for, which is that of the first stage."""
        maps = [name for stage in stages if stage.kind != "norm" for name in stage.names]
        norms = [name for stage in stages if stage.kind == "norm" for name in stage.names]
        followed = {name for stage in stages if stage.follows for name in stage.names}

        def sorted_by_stage(calls: list[WeightCall]) -> dict[Stage, list[WeightCall]]:
            return {stage: [call for call in calls if call.weight in stage.names] for stage in stages}

        def is_over(calls: list[WeightCall]) -> bool:
            return all(stage.is_over(own) for stage, own in sorted_by_stage(calls).items())

        recorder = CallRecorder(RecordedWeights.of(self.model, maps, norms), is_over, follow=followed)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if routing is not None:
                stack.enter_context(routing.imposed(self.model, stages[0].names[0]))
            stack.enter_context(self.going_on(number, place or stages[0].place))
            stack.enter_context(contextlib.suppress(ForwardDone))
            with recorder:
                self.model(**batch)
        return sorted_by_stage([self.tokens.call(call, batch, self._scores_tokens(call)) for call in recorder.calls])

    def _scores_tokens(self, call: WeightCall) -> bool:
        output = self.model.get_output_embeddings() if self.tokens.match is not None else None
        return output is not None and output.weight is self.model.get_parameter(call.weight)


class ExpertRouting:
    """Which tokens go to which expert: as the merged model (who runs first) decides, for its parents too."""

    def __init__(self, batch: Batch) -> None:
        mask = batch.get("attention_mask")
        self._valid = None if mask is None else mask.reshape(-1).bool()
        self._decided: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.tokens = 0
        self._numbered = False

    def valid(self, call: WeightCall) -> Tensor | None:
        """The rows of an expert's input that are not padding, which `imposed` has made to stand out."""
        return None if self._valid is None else ~call.input.isnan().all(-1).reshape(-1)

    def tokens_of(
        self, runner: StageRunner, stages: Sequence[Stage], stage: Stage, batch: Batch, number: int
    ) -> dict[int, Tensor]:
        """For every expert of a stage the numbers of the tokens that it is given, in the order of its rows: the experts
        run once more, and the first of their maps reads these numbers instead of features."""
        owner = stage.names[0].rpartition(".")[0]
        first = next(one for one in stages if one.kind == "experts" and one.names[0].startswith(f"{owner}."))
        self._numbered = True
        calls = runner.run([first], batch, number, self)[first]
        self._numbered = False
        return {call.expert or 0: call.input.reshape(-1, call.input.shape[-1])[:, 0].long() for call in calls}

    @contextlib.contextmanager
    def imposed(self, model: nn.Module, weight: str) -> Iterator[None]:
        owner = model.get_submodule(weight.rpartition(".")[0])

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, *rest = args
            self.tokens = hidden[..., 0].numel()
            if self._numbered:
                order = torch.arange(self.tokens, dtype=hidden.dtype, device=hidden.device)
                hidden = order.reshape(*hidden.shape[:-1], 1).expand_as(hidden).contiguous()
            if self._decided is None:
                # Padding is made to stand out, so that its rows can be told wherever the experts put them.
                if self._valid is not None and self._valid.numel() == hidden[..., 0].numel():
                    hidden = hidden.masked_fill(~self._valid.reshape(*hidden.shape[:-1], 1), float("nan"))
                self._decided = tuple(rest), dict(kwargs)
            return (hidden, *self._decided[0]), self._decided[1]

        def after(*_: Any) -> None:
            raise ForwardDone

        with owner.register_forward_pre_hook(before, with_kwargs=True), owner.register_forward_hook(after):
            yield


def require_finite_rows(rows: Tensor, what: str, who: str) -> None:
    """Numbers whose squares overflow count as infinite: a norm makes zeros of them, and the model seems to run."""
    limit = (torch.finfo(rows.dtype).max / rows.shape[-1]) ** 0.5
    if rows.numel() and not bool(rows.abs().amax() <= limit):
        count = int((~(rows.abs() <= limit)).any(-1).sum())
        raise IsomergeError(
            f"Reconstructing {what}: {who} gives {count} of {rows.shape[0]} rows with values that are not finite "
            "(NaN or infinite) or too large to be squared. Check that this model runs on the data by itself, "
            "and that the data is finite."
        )
