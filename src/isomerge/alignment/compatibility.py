"""Can these two be aligned at all? Everything knowable from headers, all problems at once."""

from __future__ import annotations

from isomerge.adapters.adapter import require_model
from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.checks import differences_in_size
from isomerge.errors import RequestError
from isomerge.symmetry.architecture import RESIDUAL, Architecture, is_stream
from isomerge.symmetry.binding import BoundModel


def problems_between(source: Checkpoint, anchor: Checkpoint) -> list[str]:
    """Reasons from config.json why two checkpoints cannot be aligned (or averaged)."""
    kinds = [c.config.get("model_type") for c in (source, anchor)]
    bare = [c.name for c in (source, anchor) if not c.config]
    if bare and len(bare) < 2:
        return [f"{bare[0]} has no config.json, so its architecture is unknown; copy it from where the model came"]
    if kinds[0] != kinds[1]:
        return [f"different architectures: '{kinds[0]}' and '{kinds[1]}'"]
    return differences_in_size(source, anchor)


def require_compatible(source: Checkpoint, anchor: Checkpoint) -> None:
    """Raise with every reason why the two do not fit together."""
    for checkpoint in (source, anchor):
        require_model(checkpoint)
    if not source.config and not anchor.config:
        raise RequestError(
            f"Aligning {source.name} to {anchor.name}: without a config.json nothing says how many heads there are or "
            "which activation, so no symmetry is known. Pass config=… for state_dicts, or copy config.json beside the "
            "weights.",
            keys=("config",),
        )
    if bare := [checkpoint.name for checkpoint in (source, anchor) if not checkpoint.config]:
        raise RequestError(
            f"Aligning {source.name} to {anchor.name}: {bare[0]} has no config.json, so its architecture is unknown; "
            "copy it from where the model came, or pass config=… for a state_dict.",
            keys=("config",),
        )
    if problems := problems_between(source, anchor):
        raise RequestError(
            f"Aligning {source.name} to {anchor.name}: {'; '.join(problems)}. Only two checkpoints of one architecture "
            "and size have a symmetry in common; pick models that share them (fine-tunes, or other seeds)."
        )


def require_same_spaces(source: BoundModel, anchor: BoundModel) -> None:
    """The weights themselves must agree too: spaces of the same size, tensors that mean the same."""
    problems = []
    for name in sorted(set(source.layouts) & set(anchor.layouts)):
        a, b = source.layouts[name], anchor.layouts[name]
        if a.pattern != b.pattern:
            problems.append(
                f"{name} is used differently in the two models; check 'tie_word_embeddings' and the head class"
            )
    for name, group in source.architecture.spaces.items():
        other = anchor.architecture.spaces.get(name)
        if other is not None and other.size != group.size:
            problems.append(f"space {name} has {group.size} units and {other.size}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise RequestError(
            f"Aligning {source.name} to {anchor.name}: {shown}. "
            "Align checkpoints of the same architecture and head class."
        )


def require_solver(solver: str, architecture: Architecture, *, activations: bool) -> None:
    """Refuse a way to find orders where there is nothing it could do, with the reason."""
    if solver == "assignment":
        return
    moving = {space: architecture.spaces[space] for space in architecture.movable()}
    ordered = [space for space, group in moving.items() if group.reorders]
    refusal = ""
    if not ordered:
        refusal = "it finds orders, and nothing that moves here changes its order. Leave solver out"
    elif solver == "graph" and len(ordered) < len(moving):
        others = ", ".join(sorted({space.split(".")[0] for space in moving if space not in ordered}))
        refusal = f"it only finds orders, and {others} would also rotate or scale. Choose level='permutation'"
    elif solver == "graph" and activations:
        refusal = "it matches weights, and data would decide beside them. Leave data out"
    elif solver == "graph" and len(architecture.streams) > 1:
        refusal = "it matches units around one residual stream, and this model has several. Leave solver out"
    elif solver == "graph" and not architecture.moves(RESIDUAL):
        refusal = "spaces depend on each other through the residual stream, which does not move. Leave solver out"
    if refusal:
        raise RequestError(f"Aligning with solver='{solver}': {refusal}.", keys=("solver",))


def require_one_stream(architecture: Architecture, act: str, instead: str, *, keys: tuple[str, ...] = ()) -> None:
    """Refuse models with several residual streams for what was made for one."""
    streams = [space for space in architecture.spaces if is_stream(space)]
    if any(space != RESIDUAL for space in streams):
        raise RequestError(
            f"{act}: it works with one residual stream, and this model has {len(streams)} ({', '.join(streams[:4])}). "
            f"{instead}",
            keys=keys,
        )
