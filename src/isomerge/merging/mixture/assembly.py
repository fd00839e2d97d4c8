"""The weights of the mixture: all models side by side, and in front of them one layer that finds out whose text it is.

An embedding is that of all models, one after the other, with the evidence of the token in coordinates of its own. In
the first layer one group of heads looks at all tokens so far alike and gives the mean of their evidence, and the expert
of model m takes the embeddings of the others out of the stream: its units have a gate that is open for every token, so
they are linear. From there on the stream of the mixture is that of m, z = (0, …, s_m, …, 0): every norm, head and
expert of m works as in the model itself, and the heads of the others read zeros and write zeros. All layers have the
same router, which reads nothing but the evidence, so that all of them send a token the same way.

Where the heads of a layer share a norm, heads of two models cannot stand in one layer. There the layers of the models
come one after the other, each dense: those of the others read zeros and write zeros as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures.expert_classes import ExpertClass
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.mixture.native import MixtureShape

QUIET = 0.01
"""Size of the evidence and of the constant, relative to an embedding: large enough for half precision, and small enough
for norms not to notice."""
OPEN = 20.0
"""Where an open gate stands: silu(x) = x there, to eight digits."""


class SideBySide:
    """All by names on disk, in float64."""

    def __init__(
        self, states: Sequence[State], shape: MixtureShape, held_by: ExpertClass, config: Any, activation: Any
    ) -> None:
        """`states`: of the models, with norms folded into their readers and tables untied. `config`: of one of them."""
        self._states, self._shape, self._held_by, self._activation = states, shape, held_by, activation
        self._epsilon = shape.width * float(config.rms_norm_eps)
        self.gain = (shape.width / shape.hidden) ** 0.5
        """Of every norm: a stream of which one model has all is normed as in that model."""

    def state(self, evidence: Tensor) -> State:
        """A whole mixture, whose routers do not choose yet. `evidence` is (tokens, models)."""
        shape = self._shape
        table = self._table(evidence)
        norm = torch.full((shape.hidden,), self.gain, dtype=torch.float64)
        state = {"model.embed_tokens.weight": table, "model.norm.weight": norm}
        state["lm_head.weight"] = self._read("lm_head.weight").sum(0)
        for layer, (of, models) in enumerate([(-1, []), *shape.order]):
            block, own = f"model.layers.{layer}.", f"model.layers.{of}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                state[f"{block}{name}.weight"] = norm.clone()
            if layer == 0:
                state |= self._listening(block)
                state |= self._experts(block, [self._clearing(m) for m in range(shape.models)])
                continue
            state |= self._attention(block, own, models)
            maps = [self._feed_forward(own, m) for m in models]
            if shape.in_turn:
                state |= {f"{block}mlp.{part}_proj.weight": whole for part, whole in maps[0].items()}
            else:
                state |= self._experts(block, [self._padded(one) for one in maps])
        return {name: tensor.contiguous() for name, tensor in state.items()}

    def routers(self, router: Tensor) -> State:
        """The same for every layer with experts: (experts, hidden)."""
        layers = range(1 if self._shape.in_turn else len(self._shape.order) + 1)
        return {f"model.layers.{k}.{self._held_by.router}": router.clone() for k in layers}

    # --- the stream ---------------------------------------------------------------------------------------------------
    def _table(self, evidence: Tensor) -> Tensor:
        """Embeddings, all of one length."""
        shape = self._shape
        tables = [state["model.embed_tokens.weight"].double() for state in self._states]
        table = tables[0].new_zeros(len(tables[0]), shape.hidden)
        table[:, : shape.streams] = torch.cat(tables, 1)
        typical = float(table.square().sum(1).mean().sqrt())
        size = float(evidence.square().mean().sqrt())
        table[:, shape.own_evidence] = evidence.to(table) * (QUIET * typical / size if size > 0 else 0.0)
        table[:, shape.constant] = QUIET * typical
        squares = table.square().sum(1)
        table[:, shape.filler] = (squares.max() - squares).clamp_min(0).sqrt()
        # What a norm makes of the stream and of the constant, in the first layer.
        self.scale = (shape.width / (float(squares.max()) + self._epsilon)) ** 0.5
        self.constant = QUIET * typical * self.scale
        return table

    def _place(self, m: int) -> slice:
        return slice(m * self._shape.width, (m + 1) * self._shape.width)

    def _read(self, name: str) -> Tensor:
        """(models, out, hidden): a map of every model, reading its own part of the stream."""
        maps = [state[name].double() for state in self._states]
        whole = maps[0].new_zeros(len(maps), len(maps[0]), self._shape.hidden)
        for m, own in enumerate(maps):
            whole[m, :, self._place(m)] = own
        return whole

    def _written(self, m: int, name: str) -> Tensor:
        """(hidden, in): a map of model m, writing to its own part of the stream."""
        own = self._states[m][name].double()
        whole = own.new_zeros(self._shape.hidden, own.shape[1])
        whole[self._place(m)] = own
        return whole

    # --- attention ----------------------------------------------------------------------------------------------------
    def _attention(self, block: str, own: str, models: Sequence[int]) -> State:
        """Heads of these models, and those that do nothing."""
        shape, state = self._shape, {}
        for part in ("q", "k", "v"):
            name = f"self_attn.{part}_proj.weight"
            silent = shape.silent * shape.head_width * (shape.queries if part == "q" else 1)
            maps = self._read(f"{own}{name}")[list(models)].flatten(0, 1)
            if part in self._held_by.norms:  # it adds what the longer stream's norms add, which is less
                maps = maps * self.gain
                norm = f"self_attn.{self._held_by.norms[part]}"
                state[block + norm] = self._states[models[0]][own + norm].double()
            state[f"{block}{name}"] = torch.cat([maps, maps.new_zeros(silent, shape.hidden)])
        name = "self_attn.o_proj.weight"
        maps = torch.cat([self._written(m, own + name) for m in models], 1)
        silent = shape.silent * shape.queries * shape.head_width
        state[block + name] = torch.cat([maps, maps.new_zeros(shape.hidden, silent)], 1)
        return state

    def _listening(self, block: str) -> State:
        """The last group looks at all tokens alike, and gives the mean of their evidence."""
        shape = self._shape
        like = self._attention(block, "model.layers.0.", shape.order[0][1])
        state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        values, writes = (state[f"{block}self_attn.{part}_proj.weight"] for part in ("v", "o"))
        group, head = shape.all_groups - 1, shape.all_heads - shape.queries
        for m in range(shape.models):
            values[group * shape.head_width + m, shape.own_evidence.start + m] = 1.0
            writes[shape.mean_evidence.start + m, head * shape.head_width + m] = 1.0 / self.scale
        return state

    # --- experts ------------------------------------------------------------------------------------------------------
    def _feed_forward(self, own: str, m: int) -> dict[str, Tensor]:
        """That of model m."""
        gate, up = (self._read(f"{own}mlp.{part}_proj.weight")[m] for part in ("gate", "up"))
        return {"gate": gate, "up": up, "down": self._written(m, f"{own}mlp.down_proj.weight")}

    def _padded(self, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As an expert, with units that do nothing."""
        more = self._shape.expert_units - self._shape.units
        gate, up = (torch.cat([maps[part], maps[part].new_zeros(more, self._shape.hidden)]) for part in ("gate", "up"))
        return {"gate": gate, "up": up, "down": torch.cat([maps["down"], gate.new_zeros(self._shape.hidden, more)], 1)}

    def _clearing(self, m: int) -> dict[str, Tensor]:
        """Takes out of the stream what belongs to other models, and the filler."""
        shape = self._shape
        own = self._place(m)
        others = [at for at in range(shape.streams) if not own.start <= at < own.stop]
        places, units = torch.tensor([*others, shape.filler]), torch.arange(len(others) + 1)
        gate, up = (torch.zeros(shape.expert_units, shape.hidden, dtype=torch.float64) for _ in range(2))
        down = torch.zeros(shape.hidden, shape.expert_units, dtype=torch.float64)
        gate[units, shape.constant] = OPEN / self.constant
        up[units, places] = 1.0
        opened = float(self._activation(torch.tensor(OPEN, dtype=torch.float64)))
        down[places, units] = -1.0 / (opened * self.scale)
        return {"gate": gate, "up": up, "down": down}

    def _experts(self, block: str, experts: Sequence[Mapping[str, Tensor]]) -> State:
        shape, names = self._shape, self._held_by
        state = {block + names.router: torch.zeros(shape.models, shape.hidden, dtype=torch.float64)}
        for m, maps in enumerate(experts):
            for part, stored in names.parts.items():
                state[f"{block}{names.expert.format(m)}{stored}.weight"] = maps[part]
        return state
