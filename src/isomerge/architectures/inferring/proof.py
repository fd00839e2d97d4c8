"""Every space of every proposal is tried alone on random weights; what changes the outputs falls, and only that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isomerge.architectures.inferring.proposals import Proposal
from isomerge.architectures.inferring.sandbox import Sandbox
from isomerge.errors import SpecificationError
from isomerge.evaluation.symmetry_proof import act_once, some_element
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout, bind
from isomerge.symmetry.transform import Transform, dimension

EXACT, CONTROL = 1e-10, 1e-7


@dataclass
class Proven:
    """A proposal with the spaces that hold, and what was found out about each."""

    proposal: Proposal
    groups: dict[str, Group] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def rank(self) -> tuple[bool, int, int]:
        """Whole before large: what is proven in every space, then the continuous dimension, then the spaces."""
        spaces = self.proposal.spaces(self.groups)
        still = [s for s, g in self.proposal.options.items() if s not in self.groups and g[0].size > 1]
        return not still, sum(dimension(spaces, space) for space in self.groups), len(self.groups)


def patterns_of(axes: Mapping[tuple[str, int], str], state: Mapping[str, Tensor]) -> dict[str, str]:
    """Axes put together: one pattern per tensor."""
    names = sorted({name for name, _ in axes})
    return {name: " ".join(axes.get((name, k), "_") for k in range(state[name].ndim)) for name in names}


def prove(sandbox: Sandbox, alternatives: Sequence[Proposal]) -> Proven | None:
    """The alternative with the largest proven groups; None if none fits the shapes."""
    best: Proven | None = None
    known: dict[str, tuple[Group | None, str]] = {}
    hinted = _partial(sandbox.config)
    for proposal in alternatives:
        try:
            layouts = _layouts(sandbox, proposal, {})
        except SpecificationError:
            continue
        found = Proven(proposal)
        for space, groups in proposal.options.items():
            same = proposal.kind == "attention" and not re.search(r"\b(qk|rotary)\.", space)
            key = space if same else None
            if key in known:
                group, reason = known[key]
            else:
                group, reason = _largest(sandbox, proposal, layouts, space, groups)
                if key is not None:
                    known[key] = group, reason
            found.reasons[space] = reason
            if group is not None:
                found.groups[space] = group
        if best is None or found.rank() > best.rank():
            best = found
        inner = {s: g for s, g in proposal.options.items() if re.search(r"\b(qk|rotary)\.", s)}
        wanted = inner if proposal.kind == "attention" else proposal.options
        if all(found.groups.get(s) == groups[0] for s, groups in wanted.items()):
            break
        if proposal.kind == "attention" and not hinted and all(s in found.groups for s in inner):
            break
    return best


def _partial(config: Mapping[str, Any]) -> bool:
    """Whether the config has a number for a part of the head that is rotary; then all parts are tried."""
    return any(
        _partial(value) if isinstance(value, Mapping)
        else bool(re.search(r"rotary|rope_head_dim", key)) and type(value) in (int, float) and value not in (0, 1)
        for key, value in config.items() if isinstance(key, str)
    )  # fmt: skip


def _layouts(sandbox: Sandbox, proposal: Proposal, proven: Mapping[str, Group]) -> dict[str, Layout]:
    spaces = proposal.spaces(proven)
    return {
        name: bind(pattern, sandbox.state[name].shape, spaces, name)
        for name, pattern in patterns_of(proposal.axes, sandbox.state).items()
    }


def _largest(
    sandbox: Sandbox, proposal: Proposal, layouts: Mapping[str, Layout], space: str, groups: Sequence[Group]
) -> tuple[Group | None, str]:
    failures = []
    for group in groups:
        failure = refutation(sandbox, proposal, layouts, space, group)
        if failure is None:
            return group, f"{group.name}, proven"
        failures.append(f"{group.name} {failure}")
    return None, f"identity: {failures[-1] if failures else 'nothing to try'}"


def refutation(
    sandbox: Sandbox, proposal: Proposal, layouts: Mapping[str, Layout], space: str, group: Group
) -> str | None:
    """Why a space does not carry a group, or None when it provably does."""
    if group.reorders and not group.signed and group.size == 1:
        return "of one unit moves nothing"
    spaces = proposal.spaces({space: group})
    transform = Transform(spaces, {space: some_element(spaces, space)})
    touched = {name: layout for name, layout in layouts.items() if space in layout.spaces()}
    if not touched:
        return "moves nothing"
    try:
        moved = {name: transform.act(sandbox.state[name], layout) for name, layout in touched.items()}
    except (SpecificationError, RuntimeError) as error:
        return f"cannot be applied ({str(error)[:80]})"
    if (difference := sandbox.difference(moved)) > EXACT:
        return f"changes the outputs by {difference:.0e}"
    name, layout = next(iter(touched.items()))
    control = max(
        sandbox.difference({name: act_once(transform, sandbox.state[name], layout)})
        for name, layout in list(touched.items())[:3]
    )
    return (
        None if control > CONTROL else f"cannot be told from a mistake, which changes the outputs by {control:.0e} only"
    )
