"""What methods that solve layer by layer share: parents and merged model, order of the layers, data, result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, parse_size
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.memory import saved_state
from isomerge.data.base import Batches
from isomerge.errors import RequestError
from isomerge.merging.layerwise.assembly import FeatureAssembly
from isomerge.merging.layerwise.joint import all_joint, turns
from isomerge.merging.layerwise.layer_matching import deepened, depth_of, match_layers, streams
from isomerge.merging.layerwise.matched_runner import MatchedRunner
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.layerwise.parents import (
    ParentModels,
    of_other_shapes,
    read_apart,
    read_parents,
    with_fixed_stream,
    with_norms_folded,
)
from isomerge.merging.layerwise.roles import ParameterRoles, file_names, find_roles
from isomerge.merging.layerwise.single_parent import fits, single_parent
from isomerge.merging.layerwise.solver import LayerReport, bias_name
from isomerge.merging.layerwise.stage_runner import StageRunner
from isomerge.merging.layerwise.stages import StagePlan, find_stages
from isomerge.merging.layerwise.token_matching import OwnTokens, TokenMatch
from isomerge.merging.layerwise.width import Width, widen
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.running.blocks import BlockCache, BlockStacks, find_stacks
from isomerge.running.passes import DataPass
from isomerge.running.stock import load_stock, run_module
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical


class LayerwiseMerge:
    """The merged model, the average at first and the result in the end, with all that it takes to solve it."""

    def __init__(
        self,
        inputs: MergeInputs,
        weights: Sequence[float],
        sources: Sequence[Batches],
        cache: str,
        *,
        joint: bool = False,
        width: Width | None = None,
        refine: bool = False,
        matches: Mapping[int, TokenMatch] | None = None,
    ) -> None:
        """`sources`: one data set for all models or one for each. `cache` bounds the memory that spares running
        finished layers again. `joint`: the stream gets a basis of its own. `width`: how much more room there is than in
        the first model. `matches`: models of other vocabularies than the first, by place; data is for all to read."""
        for checkpoint in inputs.models:
            _require_config(checkpoint)
        self.inputs, self.shares = inputs, inputs.shares(weights)
        self.matches = matches or {}
        self.parents, self._states = _parents(inputs, joint, self.matches)
        budget = 0 if cache == "0" else parse_size(cache)
        self.budget = budget // 2 if refine else budget  # the other half holds what the blocks are refined on
        share = self.budget // (4 * len(sources))
        self.examples = [
            DataPass(source, device=inputs.device, labels=False, budget=share, hashed=False) for source in sources
        ]
        if width is not None:
            self.parents = widen(self.parents, width)
        self.others = self._loaded()
        if len({depth_of(config) for config in self.parents.configs}) > 1:
            self._match_layers()
        self.start_from(self.parent_alone(0) if self.parents.views else self.assembly(self.shares))
        self.roles = find_roles(self.merged, self.parents.bound)
        self.plan = _plan(self.merged, self.roles, self.examples[0])
        self.report = LayerReport(self.roles)

    def runners(self) -> list[StageRunner]:
        """The merged model and its parents, with an empty cache: each pass starts at the front."""
        cache = BlockCache(self.plan.stacks, self.budget // 2)
        names = ("the merged model", *(checkpoint.name for checkpoint in self.inputs.models))
        views = (None, *(self.parents.views or [None] * len(self.others)))
        runners: list[StageRunner] = []
        for who, (model, name, view) in enumerate(zip((self.merged, *self.others), names, views, strict=True)):
            tokens = self._tokens(who - 1)
            if view is None or view.blocks is None:
                runners.append(StageRunner(model, name, who, cache, tokens))
            else:  # it has other layers, which are kept apart from those of the rest
                own = BlockCache(self._stacks(model), self.budget // 2 // len(names))
                runners.append(MatchedRunner(model, name, who, own, tokens, view, self._ends()))
        return runners

    def assembly(self, shares: Sequence[float], names: Mapping[str, str] | None = None) -> FeatureAssembly:
        """The mean of all parents, to start joint features from."""
        return FeatureAssembly(self.parents.bound, shares, names=names or {}, views=self.parents.views)

    def parent_alone(self, number: int) -> FeatureAssembly:
        """One parent in the shape of the merged model."""
        if self.parents.views:
            return single_parent(self.parents.bound, self.parents.views, number)
        return self.assembly([float(m == number) for m in range(len(self.shares))])

    def fits(self, number: int) -> bool:
        """Whether the merged model has room for the whole of a parent."""
        return not self.parents.views or fits(self.parents.bound, self.parents.views[number])

    def start_from(self, assembly: FeatureAssembly) -> None:
        """The merged model is now the parents' weights, put together so."""
        state = assembly.state(self._states)
        self.merged = self._load(state, self.parents.config, self._tokens(-1))
        held = self._held()
        self._unheld = {name: state[name] for name in self.parents.plan if name not in held}  # old buffers

    def result(self, record: Mapping[str, Any]) -> MergedWeights:
        """The merged model as it is now; `record` is what the method reports beside its layers."""
        first, parents = self.inputs.models[0], self.parents
        about = {
            "examples": sum(data.examples for data in self.examples), "layers": self.report.layers,
            "weights": list(self.shares), "width": parents.room, "matched": parents.matched, **record,
        }  # fmt: skip
        changes = {k: v for k, v in parents.config.items() if first.config.get(k) != v or k not in first.config}
        tensors = {name: tensor.detach().cpu() for name, tensor in self._held().items()} | self._unheld
        return MergedWeights(
            {name: tensors[name] for name in parents.plan}, parents.plan, changes, parents.alignment,
            [*self.report.warnings, *self._notes()], {key: value for key, value in about.items() if value},
        )  # fmt: skip

    def _loaded(self) -> list[Any]:
        configs = self.parents.configs or [self.parents.config] * len(self._states)
        pairs = enumerate(zip(self._states, configs, strict=True))
        return [self._load(state, config, self._tokens(m)) for m, (state, config) in pairs]

    def _tokens(self, place: int) -> OwnTokens:
        """How the model at a place reads; the merged one, at −1, as the first."""
        return OwnTokens(max(0, place), self.matches.get(place))

    # --- parents of another depth -----------------------------------------------------------------------------------
    def _match_layers(self) -> None:
        """Which layers of each parent stand for which of the first. A shallower parent gets layers that add nothing."""
        parents, found = self.parents, []
        names = [self._stacks(model).names[0] for model in self.others]
        like = streams(self.others[0], names[0], self.examples[0], self._tokens(0))
        views, configs = list(parents.views), list(parents.configs)
        for m, model in enumerate(self.others):
            if len(names[m]) == len(names[0]):
                continue
            matched = match_layers(like, streams(model, names[m], self.examples[0], self._tokens(m)))
            found.append({"model": self.inputs.models[m].name, "layers": matched})
            if len(names[m]) > len(names[0]):
                views[m] = replace(views[m], blocks=matched)
            else:
                bound, self._states[m], configs[m] = deepened(views[m].bound, self._states[m], configs[m], matched)
                views[m] = replace(views[m], bound=bound)
        self.parents = replace(parents, views=tuple(views), configs=tuple(configs), matched=found)
        self.others = self._loaded()

    def _stacks(self, model: Any) -> BlockStacks:
        few = self.examples[0].first()

        def run() -> None:
            with torch.no_grad():
                run_module(model, few)

        return find_stacks(model, run)

    def _ends(self) -> frozenset[str]:
        """The weights that are the last to write to the stream in their layer."""
        last = {stage.place: stage for stage in self.plan.stages if stage.kind == "sum"}
        return frozenset(name for stage in last.values() for name in stage.names)

    def _load(self, state: State, config: Mapping[str, Any], tokens: OwnTokens) -> Any:
        model = stock_module(config, state, self.parents.precision, self.inputs.device)
        if self.matches:
            tokens.install(model)
        return model

    def _held(self) -> State:
        """The weights of the merged module by name on disk."""
        return held_by(self.merged, self.parents.bound)

    def _notes(self) -> list[str]:
        notes = list(self.parents.notes)
        if _is_tied(self.merged):
            notes.append("the output table is tied to the input table, so it is not solved: both stay averaged")
        if self.roles.writers is None:
            notes.append(
                "no specification says who writes to the residual stream: whatever is added to a sum is taken as a "
                "writer"
            )
        solved = {name for stage in self.plan.stages for name in stage.names}
        unseen = [self.roles.label(n) for n in self.roles.weights if n not in solved and n.endswith("weight")]
        if unseen:
            notes.append(
                f"{len(unseen)} weights stay averaged, as no linear map was seen to use them: {name_some(unseen)}"
            )
        return notes


def _parents(inputs: MergeInputs, joint: bool, matches: Mapping[int, TokenMatch]) -> tuple[ParentModels, list[State]]:
    """The parents, aligned where that is asked for and of use; canonical if the stream gets a basis of its own."""
    if not joint:
        return read_parents(inputs)
    if matches or of_other_shapes(inputs.models):
        return read_apart(inputs, matches)
    apart = [describe(checkpoint, untie=True) for checkpoint in inputs.models]
    small = [name for one in apart for name in Canonical(one, [RESIDUAL]).undividable()] if turns(apart[0]) else []
    if turns(apart[0]) and not small:
        needless = inputs.align is not None and len(inputs.models) > 1 and all_joint(apart[0])
        parents, states = read_parents(inputs, align=not needless)
        if needless:
            parents.notes.append("the models were not aligned: joint features do not depend on the basis of each model")
        return with_norms_folded(parents, states)
    parents, states = read_parents(inputs)
    why = f"the gain of {small[0]} is too small to divide by" if small else "of this kind of model it cannot be turned"
    parents.notes.append(f"the residual stream is the mean of the models', since {why}")
    return with_fixed_stream(parents), states


def stock_module(config: Mapping[str, Any], state: State, precision: torch.dtype, device: str) -> Any:
    """A model that is run for what it computes: nothing is generated, and nothing asks for gradients."""
    model = load_stock(config, state, dtype=precision).to(device).requires_grad_(False)
    for part in model.modules():  # a decoder may have a configuration of its own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    if config.get("tie_word_embeddings") is False and _is_tied(model):  # some load equal tables as one
        output = model.get_output_embeddings()
        output.weight = torch.nn.Parameter(output.weight.clone(), requires_grad=False)
    return model


def held_by(module: Any, bound: BoundModel) -> State:
    """The weights of a stock module by the names that `bound` has on disk."""
    renamed = file_names(bound)
    return {renamed.get(name, name): tensor for name, tensor in saved_state(module, "the merged model").items()}


def _is_tied(model: Any) -> bool:
    """The output table is the input table."""
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


def _plan(model: Any, roles: ParameterRoles, examples: DataPass) -> StagePlan:
    """What to solve in which order, from a forward pass on a few examples."""
    few = examples.first()

    def run() -> None:
        with torch.no_grad():
            model(**few)

    names = {name for name, _ in model.named_parameters()}
    stacks = find_stacks(model, run)
    return find_stages(
        model, run, stacks, weights=roles.weights, norms=roles.norms, writes=roles.writes,
        has_bias=lambda name: bias_name(name) in names,
    )  # fmt: skip


def _require_config(checkpoint: Checkpoint) -> None:
    if not checkpoint.config:
        raise RequestError(
            f"Merging {checkpoint.name} layer by layer: it has no config.json, so no stock class can run it. "
            "Give a folder with config.json, or a transformers module."
        )
