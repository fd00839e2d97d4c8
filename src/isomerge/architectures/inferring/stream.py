"""The residual stream may rotate where every norm's gain can be folded into what reads the norm.

Which kind a norm is (LayerNorm, RMSNorm, gains stored as w or 1 + w) is asked of the module itself, by numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from isomerge.architectures.inferring.influence import OUTPUT, Event
from isomerge.architectures.inferring.proposals import Proposal
from isomerge.architectures.inferring.units import Units
from isomerge.symmetry.architecture import RESIDUAL, Norm


def norms_with_readers(units: Units, proposal: Proposal) -> tuple[list[Norm], str]:
    """Every norm of the stream with the weights that read it; or why its gains cannot be folded."""
    found, gains = [], {axis[0] for axis, pattern in proposal.axes.items() if pattern == f"|{RESIDUAL}|"}
    trace = units.tracer.trace
    for module_name, module in units.tracer.norms.items():
        sources = [e for e in trace.sources if _belongs(units, e, module_name)]
        weights = {n for e in sources for n, _, _ in units.on_disk(e.port)} & gains
        if not weights:
            continue
        weight = weights.pop()
        gains.discard(weight)
        if not weight.endswith(".weight") or weights:
            return [], f"{weight} is not a norm's weight alone"
        kind = norm_kind(module)
        if kind is None:
            return [], f"{weight} multiplies the stream, and belongs to no LayerNorm or RMSNorm"
        readers = list(_readers(units, sources))
        if None in readers:
            return [], f"what {weight} gives is not only read by layers"
        names = tuple(dict.fromkeys(name for name in readers if name is not None))
        tied = [n for n in names for a in (0, 1) if units.kinds.get((n, a)) == {"source", "sink"}]
        if tied:
            return [], f"{tied[0]} is written and read: a tied table"
        found.append(Norm(weight.removesuffix(".weight"), names, kind[0], kind[1]))
    if gains:
        return [], f"{min(gains)} multiplies the stream and cannot be folded"
    return found, ""


def _belongs(units: Units, event: Event, module: str) -> bool:
    own = [n for n, _ in units.tracer.norms[module].named_parameters()]
    return event.port.parameter in {f"{module}.{n}" for n in own}


def _readers(units: Units, sources: list[Event]) -> Iterator[str | None]:
    """The weights on disk behind a norm; None for anything that is no weight's input."""
    for response in units.tracer.trace.responses:
        if not any(response.source is s for s in sources):
            continue
        port = response.sink.port
        if port.parameter == OUTPUT or units.sandbox.places[port.parameter].ndim < 2:
            yield None
            continue
        for name, _, _ in units.on_disk(port):
            yield name


def norm_kind(module: nn.Module) -> tuple[str, float] | None:
    """("layer" or "rms", what is added to the stored gain), by what the module computes."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None:
        return None
    x = 3 * torch.randn(5, weight.numel(), dtype=weight.dtype, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            got = module(x[None])[0]
    except (RuntimeError, TypeError):
        return None
    bias = own.get("bias", torch.zeros_like(weight))
    centred = x - x.mean(-1, keepdim=True)
    forms = {
        ("rms", 0.0): x / x.square().mean(-1, keepdim=True).sqrt() * weight + bias,
        ("rms", 1.0): x / x.square().mean(-1, keepdim=True).sqrt() * (1 + weight) + bias,
        ("layer", 0.0): centred / centred.square().mean(-1, keepdim=True).sqrt() * weight + bias,
        ("layer", 1.0): centred / centred.square().mean(-1, keepdim=True).sqrt() * (1 + weight) + bias,
    }
    close = {kind: float((form - got).abs().max() / got.abs().max()) for kind, form in forms.items()}
    best = min(close, key=lambda kind: close[kind])
    return best if close[best] < 1e-3 else None
