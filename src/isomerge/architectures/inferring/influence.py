"""Which unit acts on which: every weight of a running model is nudged, one unit per example, and the inputs of all
other weights are compared with what they were.

Between two weights lies only what has no weights: activations, products, sums, reshapes, attention. Every output of a
weight is held at its first value, save the one that is nudged, so that only the *direct* way to the next weights is
seen: a hidden unit moves one input of the next layer, a query moves all inputs behind its head, and what is written to
a residual stream moves the same unit of every norm and reader behind it. Names play no part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isomerge.architectures.inferring.sandbox import Sandbox, in_float64

BATCH = 96
NUDGE, SEEN = 0.7, 1e-9
OUTPUT = "(output)"
PRODUCTS = {"linear": 1, "matmul": 1, "__matmul__": 1, "addmm": 2}


@dataclass(frozen=True)
class Port:
    """Units of a parameter: along `axis`, from `start` on, of one of the experts it may stack."""

    parameter: str
    axis: int
    start: int = 0
    expert: int | None = None


@dataclass
class Event:
    """A use of a weight: its input (a sink) or its output (a source), with the units on the last axis."""

    port: Port
    value: Tensor
    unit_axis: int
    others: tuple[Port, ...] = ()  # whose units are the same: a bias, a norm's gain
    aligned: bool = True  # its rows follow the examples; those given to an expert do not


@dataclass
class Response:
    """What nudging a source did to one sink: `moved[i, j]`, and which units moved another example or place."""

    source: Event
    sink: Event
    moved: Tensor
    local: Tensor | None = None


class Recorder(TorchFunctionMode):
    """Sources and sinks of one forward pass, in order. With `held`, outputs are those of an earlier one."""

    def __init__(self, model: nn.Module, norms: Mapping[str, nn.Module], held: list[Event] | None = None) -> None:
        super().__init__()
        self.sources: list[Event] = []
        self.sinks: list[Event] = []
        self.held, self.nudged = held, -1
        self.nudge: Callable[[Event], Tensor] = lambda event: event.value
        self._inside = 0
        self.attentions = 0
        self._known = {p.untyped_storage().data_ptr(): (name, p) for name, p in model.named_parameters()}
        self._norms, self._hooks = norms, contextlib.ExitStack()
        self._names = {id(p): name for name, p in model.named_parameters()}

    def __enter__(self) -> Recorder:
        for name, module in self._norms.items():
            self._hooks.enter_context(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._hooks.enter_context(module.register_forward_hook(self._after(name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._hooks.close()

    # --- norms and other vectors that are a module ---------------------------------------------------------------
    def _ports_of(self, name: str) -> tuple[Port, ...]:
        own = self._norms[name].named_parameters()
        return tuple(Port(self._names[id(p)], 0) for _, p in own if id(p) in self._names) or (Port(name, 0),)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._inside += 1
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                    first, *rest = self._ports_of(name)
                    self.sinks.append(Event(first, value.clone(), unit_axis(module, value), tuple(rest)))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            self._inside -= 1
            first, *rest = self._ports_of(name)
            if not isinstance(output, Tensor):
                return output
            return self._source(Event(first, output, unit_axis(module, output), tuple(rest)))

        return hook

    # --- products with a parameter -------------------------------------------------------------------------------
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = in_float64(func, args, kwargs)
        if self._inside or not isinstance(result, Tensor):
            return result
        name = getattr(func, "__name__", "")
        self.attentions += name == "scaled_dot_product_attention" or (name == "softmax" and result.ndim >= 4)
        if name in PRODUCTS and len(args) > PRODUCTS[name]:
            at = PRODUCTS[name]
            bias = args[2] if name == "linear" and len(args) > 2 else args[0] if name == "addmm" else None
            return self._product(args[at - 1], args[at], kwargs.get("bias", bias), result, turned=func is F.linear)
        if name == "embedding" and (known := self._parameter(args[1])):
            return self._source(Event(Port(known[0], 1), result, -1))
        if name in ("conv1d", "conv2d"):
            given = {
                **dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)),
                **kwargs,
            }
            if known := self._parameter(given["weight"]):
                return self._convolution(known[0], given, result)
        return result

    def _parameter(self, weight: Any) -> tuple[str, Tensor] | None:
        return self._known.get(weight.untyped_storage().data_ptr()) if isinstance(weight, Tensor) else None

    def _product(self, value: Tensor, weight: Any, bias: Any, result: Tensor, *, turned: bool) -> Tensor:
        known = self._parameter(weight)
        if known is None or weight.ndim != 2:
            return result
        name, whole = known
        expert, start, first = None, 0, 0
        if whole.ndim == 3:
            expert, first = weight.storage_offset() // whole.stride(0), 1
        elif whole.ndim != 2:
            return result
        else:
            start = weight.storage_offset() // whole.stride(0) if whole.stride(0) else 0
        out_first = turned == (weight.stride()[-2:] == whole.stride()[-2:])
        out, into = (first, first + 1) if out_first else (first + 1, first)
        self.sinks.append(Event(Port(name, into, 0, expert), value.clone(), -1))
        biases: tuple[Port, ...] = ()
        if (known_bias := self._parameter(bias)) and known_bias[1].ndim == 1:
            biases = (Port(known_bias[0], 0, bias.storage_offset()),)
        elif known_bias:
            biases = (Port(known_bias[0], 1, 0, bias.storage_offset() // known_bias[1].stride(0)),)
        return self._source(Event(Port(name, out, start, expert), result, -1, biases))

    def _convolution(self, name: str, given: Mapping[str, Any], result: Tensor) -> Tensor:
        axis = 1 - given["weight"].ndim  # of the units: (…, units, places)
        bias = self._parameter(given.get("bias"))
        self.sinks.append(Event(Port(name, 0 if given.get("groups", 1) > 1 else 1), given["input"].clone(), axis))
        return self._source(Event(Port(name, 0), result, axis, (Port(bias[0], 0),) if bias else ()))

    def _source(self, event: Event) -> Tensor:
        number = len(self.sources)
        self.sources.append(event)
        if self.held is None:
            output, event.value = event.value, event.value.clone()  # the model may write into its own
            return output
        before = self.held[number].value
        if before.shape != event.value.shape:
            raise RuntimeError("the model went another way")
        event.value, event.aligned = before, self.held[number].aligned
        return self.nudge(event) if number == self.nudged else before.clone()


def unit_axis(module: nn.Module, value: Tensor) -> int:
    """Where the units of a norm's input are: on the last axis, or on the second (batch norms, groups)."""
    sizes = {p.numel() for p in module.parameters(recurse=False)}
    return -1 if not sizes or value.shape[-1] in sizes or value.shape[1] not in sizes else 1 - value.ndim


def norms_of(model: nn.Module, widths: set[int]) -> dict[str, nn.Module]:
    """Modules that hold only vectors as wide as a stream (norms, layer scales), and norms that hold nothing."""
    found = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if any(True for _ in module.children()):
            continue
        vectors = own and all(p.ndim == 1 and p.numel() in widths for p in own)
        if vectors or (not own and "norm" in type(module).__name__.lower()):
            found[name] = module
    return found


def as_rows(event: Event, batch: int) -> Tensor | None:
    """(examples, places, units); None where rows were gathered from several examples."""
    value = event.value.movedim(event.unit_axis, -1)
    if not event.aligned or value.ndim < 2 or value.shape[0] % batch:
        return None
    return value.reshape(batch, -1, value.shape[-1])


@dataclass
class Trace:
    """All direct influences of one model."""

    sources: list[Event] = field(default_factory=list)
    sinks: list[Event] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)


class Tracer:
    """Runs the nudges. The base pass is held throughout."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.model = sandbox, sandbox.model
        sandbox.write(sandbox.state)
        widths = {p.shape[-1] for n, p in self.model.named_parameters() if p.ndim > 1} | {
            p.shape[0] for n, p in self.model.named_parameters() if p.ndim > 2
        }
        self.norms = norms_of(self.model, {w for w in widths if w > 12})
        self.trace = Trace()

    def run(self) -> Trace:
        with self.sandbox.batch_of(BATCH), torch.no_grad():
            base = self._pass(None, -1, lambda event: event.value)
            self.base = base
            self._find_aligned(base)
            self.trace.sources, self.trace.sinks = base.sources, base.sinks
            for number, source in enumerate(base.sources):
                self._follow(number, source)
            mixed = {id(r.sink) for r in self.trace.responses if _is_block(r.moved)}
            for number, source in enumerate(base.sources):
                if any(r.source is source and id(r.sink) in mixed for r in self.trace.responses):
                    self._find_local(number, source)
        return self.trace

    def _find_aligned(self, base: Recorder) -> None:
        """Rows that follow the examples go round with them."""
        kept = self.sandbox.inputs
        self.sandbox.inputs = {name: value.roll(1, 0) for name, value in kept.items()}
        turned = self._pass(None, -1, lambda event: event.value)
        self.sandbox.inputs = kept
        pairs = [*zip(base.sources, turned.sources), *zip(base.sinks, turned.sinks)]  # noqa: B905 — experts may differ
        for old, new in pairs:
            first, second = as_rows(old, BATCH), as_rows(new, BATCH)
            old.aligned = (
                first is not None
                and second is not None
                and first.shape == second.shape
                and torch.allclose(first.roll(1, 0), second, rtol=1e-6, atol=1e-9)
            )

    def _pass(self, held: list[Event] | None, nudged: int, nudge: Callable[[Event], Tensor]) -> Recorder:
        recorder = Recorder(self.model, self.norms, held)
        recorder.nudged, recorder.nudge = nudged, nudge
        with recorder:
            result = self.model(**self.sandbox.inputs)
        for name in ("logits", "start_logits", "last_hidden_state", "pooler_output"):
            value = result.get(name)
            if isinstance(value, Tensor):
                recorder.sinks.append(Event(Port(OUTPUT, 0), value, -1))
                break
        return recorder

    def _follow(self, number: int, source: Event) -> None:
        rows = as_rows(source, BATCH)
        units = source.value.shape[source.unit_axis]
        span = BATCH if rows is not None else units
        for first in range(0, units, span):
            moved = self._moved(number, first, None)
            for index, hit in moved.items():
                response = self._response(source, index)
                response.moved[first : first + hit.shape[0]] |= hit[: units - first]
        if rows is None:
            self._probe(number, source, units)
        for response in self.trace.responses:
            if response.source is source:
                fill_diagonals(response.moved, few=as_rows(response.sink, BATCH) is None)

    def _probe(self, number: int, source: Event, units: int) -> None:
        """Rows that are scattered again (an expert's): if some units each move the same unit, all do."""
        same: dict[int, bool] = {}
        for unit in sorted({0, 1 % units, units // 2, units - 1}):
            try:
                after = self._pass(self.base.sources, number, lambda event, u=unit: nudged_unit(event, u))  # type: ignore[misc]
            except RuntimeError:
                return
            for index, (old, new) in enumerate(zip(self.base.sinks, after.sinks, strict=True)):
                if old.value.shape != new.value.shape or old.value.shape[old.unit_axis] != units:
                    continue
                changed = ((new.value - old.value).abs() > SEEN).movedim(old.unit_axis, -1).reshape(-1, units).any(0)
                if changed.any():
                    same[index] = same.get(index, True) and changed.nonzero().flatten().tolist() == [unit]
        for index, identical in same.items():
            if identical:
                self._response(source, index).moved.fill_diagonal_(True)

    def _find_local(self, number: int, source: Event) -> None:
        """Which units act only where they are (queries, gates), and which on other positions (keys, values)."""
        rows = as_rows(source, BATCH)
        if rows is None:
            return
        units = rows.shape[-1]
        for response in self.trace.responses:
            if response.source is source:
                response.local = torch.ones(units, dtype=torch.bool)
        for first in range(0, units, BATCH):
            for index, hit in self._moved(number, first, rows.shape[1] // 2).items():
                local = self._response(source, index).local
                assert local is not None
                local[first : first + len(hit)] &= ~hit.any(-1)[: units - first]

    def _response(self, source: Event, index: int) -> Response:
        sink = self.trace.sinks[index]
        for response in self.trace.responses:
            if response.source is source and response.sink is sink:
                return response
        size = source.value.shape[source.unit_axis], sink.value.shape[sink.unit_axis]
        self.trace.responses.append(Response(source, sink, torch.zeros(size, dtype=torch.bool)))
        return self.trace.responses[-1]

    def _moved(self, number: int, first: int, place: int | None) -> dict[int, Tensor]:
        """For every sink, which of its units moved in the example (or row) where unit `first + k` was nudged.

        With a `place`, only that position is nudged, and what moved there does not count: what is left has passed from
        one position to another.
        """
        try:
            after = self._pass(self.base.sources, number, lambda event: nudged(event, first, place))
        except RuntimeError:
            return {}
        source = self.base.sources[number]
        together = as_rows(source, BATCH) is not None
        found = {}
        for index, (old, new) in enumerate(zip(self.base.sinks, after.sinks, strict=True)):
            if old.value.shape != new.value.shape:
                continue
            scale = float(old.value.abs().max()) or 1.0
            changed = Event(
                old.port, ((new.value - old.value).abs() > SEEN * scale), old.unit_axis, aligned=old.aligned
            )
            if not changed.value.any():
                continue
            hit = _by_example(changed, place) if together else _by_row(changed, source)
            if hit is None and together:
                hit = _by_amount(old, new, first, source.value.shape[source.unit_axis])
            if hit is not None and hit.any():
                found[index] = hit
        return found


def moved_by_parameter(tracer: Tracer, name: str, axis: int, index: int) -> dict[int, Tensor]:
    """For every sink the units that move when one slice of a parameter does."""
    parameter = dict(tracer.model.named_parameters())[name]
    kept = parameter.data.clone()
    try:
        parameter.data.select(axis, index).add_(NUDGE)
        with tracer.sandbox.batch_of(BATCH), torch.no_grad():
            after = tracer._pass(tracer.base.sources, -1, lambda event: event.value)
    except RuntimeError:
        return {}
    finally:
        parameter.data.copy_(kept)
    found = {}
    for number, (old, new) in enumerate(zip(tracer.base.sinks, after.sinks, strict=True)):
        if old.value.shape == new.value.shape:
            changed = ((new.value - old.value).abs() > SEEN).movedim(old.unit_axis, -1)
            hit = changed.reshape(-1, changed.shape[-1]).any(0)
            if hit.any():
                found[number] = hit
    return found


def nudged_unit(event: Event, unit: int) -> Tensor:
    value = event.value.clone()
    value.select(event.unit_axis, unit).add_(NUDGE)
    return value


def nudged(event: Event, first: int, place: int | None) -> Tensor:
    value = event.value.movedim(event.unit_axis, -1).clone()
    units = value.shape[-1]
    if as_rows(event, BATCH) is not None:
        rows = value.reshape(BATCH, -1, units)
        for k in range(min(BATCH, units - first)):
            rows[k, positions(rows.shape[1]) if place is None else place, first + k] += amount(first + k)
        value = rows.reshape(value.shape)
    else:
        rows = value.reshape(-1, units)
        number = torch.arange(len(rows))
        rows[number, number % units] += NUDGE
        value = rows.reshape(value.shape)
    return value.movedim(-1, event.unit_axis)


def positions(count: int) -> list[int]:
    """The first, the last and every second: softmax drops what all keys have in common."""
    return sorted({0, *range(1, count, 2), *([count - 1] if count > 3 else [])})


def amount(unit: int) -> float:
    """A size of its own for every unit, so that a copy of it says whose it is."""
    return NUDGE * (1 + unit / 1000)


def _by_example(changed: Event, place: int | None) -> Tensor | None:
    rows = as_rows(changed, BATCH)
    if rows is None:
        return None
    if place is not None and rows.shape[1] > place:
        rows = rows.clone()
        rows[:, place] = False
    return rows.any(1)


def _by_row(changed: Event, source: Event) -> Tensor | None:
    """Rows gathered in one order: row r had unit r mod n."""
    value = changed.value.movedim(changed.unit_axis, -1)
    rows, units = value.reshape(-1, value.shape[-1]), source.value.shape[source.unit_axis]
    if changed.aligned or len(rows) != source.value.numel() // units:
        return None
    hit = torch.zeros(units, rows.shape[-1], dtype=torch.bool)
    for unit in range(min(units, len(rows))):
        hit[unit] = rows[unit::units].any(0)
    return hit


def _by_amount(old: Event, new: Event, first: int, units: int) -> Tensor | None:
    """Rows gathered from all examples: a copied nudge has the size of its unit."""
    difference = (new.value - old.value).movedim(old.unit_axis, -1).reshape(-1, old.value.shape[old.unit_axis])
    hit = torch.zeros(min(BATCH, units - first), difference.shape[-1], dtype=torch.bool)
    rows, columns = (difference.abs() > SEEN).nonzero(as_tuple=True)
    if len(set(rows.tolist())) != len(rows):
        return None  # more than one unit of a row: not a copy
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        unit = round((float(difference[row, column]) / NUDGE - 1) * 1000) - first
        if not 0 <= unit < len(hit) or abs(float(difference[row, column]) - amount(unit + first)) > 1e-7:
            return None
        hit[unit, column] = True
    return hit


def fill_diagonals(moved: Tensor, *, few: bool) -> None:
    """A square in which units move only their own: those that did not show (inactive, sent elsewhere) do too.

    Half of the units must have shown; a few, where rows were gathered and not every unit came past.
    """
    size = moved.shape[1]
    for first in range(0, len(moved) - size + 1, size):
        square = moved[first : first + size]
        on = int(square.diagonal().sum())
        if int(square.sum()) == on and on >= (min(3, size) if few else size / 2) and on > 1:
            square.fill_diagonal_(True)


def _is_block(moved: Tensor) -> bool:
    """Some unit moves several, and not all."""
    count = moved.sum(1)
    return bool(((count > 1) & (count < moved.shape[1])).any() or (moved.any(1) & (count == moved.shape[1])).any())
