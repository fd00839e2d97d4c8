"""Parts of models whose layers have experts behind a router: letter `m` runs over those, `f` over layers without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from isomerge.architectures import parts
from isomerge.symmetry.architecture import Facts, RowShift
from isomerge.symmetry.groups import Group, Permutation, SignedScale

LAYER = "model.layers.{m}."
MLP = LAYER + "mlp."
DENSE = "model.layers.{f}."
EXPERT = MLP + "experts.{e}."
STACK = {"e": "expert.{m}"}
ROUTER = MLP + "gate.weight"
ROUTER_SHIFT = RowShift(ROUTER)  # under softmax: every expert's score grows alike
READERS = (ROUTER, EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight")


def expert_spaces(count: int, units: int, shared: int = 0) -> dict[str, Group]:
    """Experts change places, units inside each of them; `shared` units are of an expert that every token meets."""
    return {
        "expert.{m}": Permutation(count),
        "ffn.{m}": Permutation(units, per=("expert.{m}",)),
        "up.{m}": SignedScale(1, per=("expert.{m}", "ffn.{m}")),
        **({"ffn.shared.{m}": Permutation(shared)} if shared else {}),
        **({"up.shared.{m}": SignedScale(1, per=("ffn.shared.{m}",))} if shared else {}),
    }


BY_GROUPS = {"e": "group.{m} expert.{m}"}


def grouped(pattern: str) -> str:
    """The same where experts are chosen by groups: groups change places, and experts inside a group."""
    return pattern.replace("expert.{m}", "(group.{m} expert.{m})")


def grouped_spaces(spaces: Mapping[str, Group], groups: int) -> dict[str, Group]:
    """`expert_spaces` for as many groups of experts."""
    outer = ("group.{m}",)
    nested = {
        name: replace(group, per=outer + group.per) if "expert.{m}" in (name, *group.per) else group
        for name, group in spaces.items()
    }
    nested["expert.{m}"] = Permutation(spaces["expert.{m}"].size // groups, per=outer)
    return {"group.{m}": Permutation(groups), **nested}


def expert_count(facts: Facts) -> int:
    """Under the name that version 5 of transformers writes for every family, or under the family's own."""
    return int(facts["num_local_experts" if "num_local_experts" in facts.config else "num_experts"])


def expert_tensors() -> dict[str, str]:
    return {
        ROUTER: "expert.{m} residual'",
        EXPERT + "gate_proj.weight": "(expert.{m} ffn.{m}) residual'",
        EXPERT + "up_proj.weight": "(expert.{m} ffn.{m} up.{m}) residual'",
        EXPERT + "down_proj.weight": "residual (expert.{m} ffn.{m} up.{m}')",
    }


def shared_tensors(name: str) -> dict[str, str]:
    """The expert that every token meets."""
    return {
        MLP + name + ".gate_proj.weight": "ffn.shared.{m} residual'",
        MLP + name + ".up_proj.weight": "(ffn.shared.{m} up.shared.{m}) residual'",
        MLP + name + ".down_proj.weight": "residual (ffn.shared.{m} up.shared.{m}')",
    }


def shared_readers(name: str) -> tuple[str, ...]:
    return (MLP + name + ".gate_proj.weight", MLP + name + ".up_proj.weight")


def dense_spaces(facts: Facts) -> dict[str, Group]:
    return {"ffn.{f}": Permutation(facts["intermediate_size"]), "up.{f}": SignedScale(1, per=("ffn.{f}",))}


def dense_tensors() -> dict[str, str]:
    return parts.numbered(parts.gated_tensors(), "f")


def norms_before(readers: Sequence[str], norm: str = "post_attention_layernorm") -> dict[str, tuple[str, ...]]:
    """The norm in front of the feed-forward, in layers of either kind."""
    dense = tuple(name.replace("{i}", "{f}") for name in parts.GATE_AND_UP)
    return {DENSE + norm: dense, LAYER + norm: tuple(readers)}


def layers_of_either_kind(facts: Facts, sparse: Sequence[bool]) -> Mapping[str, int | Sequence[int]]:
    """Which layers have experts."""
    return {
        "i": facts["num_hidden_layers"],
        "m": [i for i, has in enumerate(sparse) if has],
        "f": [i for i, has in enumerate(sparse) if not has],
    }


def sparse_by_step(facts: Facts) -> list[bool]:
    """Every so many layers, but not those that config.json names."""
    step, named = facts.get("decoder_sparse_step", 1), facts.get("mlp_only_layers", [])
    return [i not in named and (i + 1) % step == 0 for i in range(facts["num_hidden_layers"])]
