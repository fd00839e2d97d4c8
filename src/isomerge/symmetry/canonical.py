"""Canonical form: every gauge fixed, exactly, so that only the groups are left between two equal models.

In this order: norms are folded into their readers, gains on a layer's output into the layer (`output_scales.py`),
writers (and readers) are centred where a LayerNorm drops the mean, biases that softmax drops or attention passes
through are moved out of the way. (Balancing the factors of an invertible space is a group element, so it belongs to the
alignment.) Each step is undone by `in_gauge`, which writes a canonical model *in the gauge of another one*, so that the
plain mean of the two files is the mean of the two canonical forms.

The bias of a norm *on* the stream (post-norm models) is a gauge too, and stays where it is: folded into its readers it
becomes a bias far larger than theirs, which then drowns the weights. On two real RoBERTa models the mean after folding
it had a masked-LM loss of 3.44, without folding 3.21 (plain mean 3.41).

Everything works tensor by tensor on demand: a canonical tensor is a function of a few raw ones, so memory stays at one
unit however large the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.errors import AlignmentError
from isomerge.symmetry.architecture import KeyBias, Norm, ValueBias, is_stream
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.output_scales import OutputScales
from isomerge.symmetry.patterns import Segment

SMALL_GAIN = 1e-3  # a gain below this fraction of the median cannot be divided by safely

Provider = Callable[[str], Tensor]


@dataclass(frozen=True)
class Fold:
    """One norm with the readers that are there, and whether its bias can move into them."""

    norm: Norm
    readers: tuple[str, ...]
    bias_too: bool


class Canonical:
    """The canonical form of a model, for the gauges of the spaces in `moving`.

    A space that stays needs no gauge fixed, so its tensors stay bit-identical. `gauges=False` (levels `permutation` and
    `rotation`) leaves every tensor as it is. `record` replaces this model's own gauge by one that was stored.
    """

    def __init__(
        self,
        model: BoundModel,
        moving: Collection[str],
        *,
        gauges: bool = True,
        record: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.stored = record
        self.moving = {s for s in moving if model.architecture.moves(s)} if gauges else set()
        self.scales = OutputScales(model, self.moving)
        self.folds = [f for n in model.architecture.norms if isinstance(n, Norm) and (f := self._fold(n))]
        self.reader_fold = {reader: fold for fold in self.folds for reader in fold.readers}
        self.norm_weight = {f.norm.name + ".weight": f for f in self.folds}
        self.norm_bias = {f.norm.name + ".bias": f for f in self.folds}
        writers = [w for w in model.architecture.writers if w in model.layouts]
        self.centred = {w for w in writers if self._stream(w, dual=False) in self.moving}
        self.centred_readers = {r for f in self.folds if f.norm.kind == "layer" and f.bias_too for r in f.readers}
        present = [g for g in model.architecture.gauges if getattr(g, "bias", None) in model.layouts]
        self.keys = [g for g in present if isinstance(g, KeyBias) and g.space in self.moving]
        self.values = [
            g for g in present if isinstance(g, ValueBias) and g.space in self.moving and model.bias_of(g.output)
        ]

    # --- which gauges are there -------------------------------------------------------------------------------------
    def _fold(self, norm: Norm) -> Fold | None:
        model = self.model
        readers = tuple(r for r in norm.readers if r in model.layouts)
        if norm.name + ".weight" not in model.layouts or not readers:
            return None
        space = self._normed(norm)
        # A tied output table is also the input table: nothing can be folded into it.
        if space not in self.moving or any(self._read_axis(r, space) is None for r in readers):
            return None
        return Fold(norm, readers, all(model.bias_of(r) for r in readers))

    # --- the record of this model's own gauge -----------------------------------------------------------------------
    def gain(self, norm: Norm) -> Tensor:
        """γ as it multiplies."""
        return self._own("value", norm.name + ".weight") + norm.offset

    def shift(self, norm: str) -> Tensor | None:
        """β, where the norm has one."""
        return self._own("value", norm + ".bias") if norm + ".bias" in self.model.layouts else None

    def _own(self, kind: str, name: str) -> Tensor:
        """An entry of this model's gauge: computed when asked for, or as it was stored."""
        if self.stored is not None:
            return self._checked(kind, name, self.stored).to(self.model.device)
        if kind == "value":
            return self.model.raw(name)
        if kind == "bias":
            return self._uncentred(name)
        return _mean(self._uncentred(name), *self._mean_axis(name))

    def _checked(self, kind: str, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """An entry of a stored gauge, which a damaged file may lack or have in another shape."""
        shape = list(self.model.layouts[name].shape)
        if kind == "mean":
            axis, length = self._mean_axis(name)
            shape[axis] //= length
        try:
            entry = stored[f"{kind}:{name}"]
        except KeyError as error:
            raise AlignmentError(f"Reading the stored gauge: {kind}:{name} is missing. The file is damaged.") from error
        # Tables may be of another length than the anchor's; their means are taken row by row.
        fits = entry.dim() == len(shape) if kind == "mean" else list(entry.shape) == shape
        if not fits or entry.dtype != torch.float64:
            raise AlignmentError(
                f"Reading the stored gauge: {kind}:{name} is {entry.dtype} of shape {tuple(entry.shape)}, and should "
                f"be float64 of shape {tuple(shape)}. The file is damaged."
            )
        return entry

    def record(self) -> dict[str, Tensor]:
        """Everything `in_gauge` needs of this model, to be stored beside a transform."""
        norms = [name for f in self.folds for name in (f.norm.name + ".weight", f.norm.name + ".bias")]
        values = [n for n in (*norms, *self.scales.recorded) if n in self.model.layouts]
        biases = {g.bias for g in self.keys} | {g.bias for g in self.values}
        wanted = [("value", n) for n in values] + [("bias", n) for n in biases]
        wanted += [("mean", n) for n in self.centred | self.centred_readers]
        return {f"{kind}:{name}": self._own(kind, name) for kind, name in sorted(wanted)}

    def fragile_gains(self, below: float = SMALL_GAIN) -> list[str]:
        """Norms with a gain too small to divide by: their canonical form cannot be written in this model's gauge."""
        fragile = []
        for fold in self.folds:
            if _too_small(self.gain(fold.norm), below):
                fragile.append(fold.norm.name)
        scales = {gauge.name for gauge in self.scales.branches.values()}
        return fragile + [name for name in sorted(scales) if _too_small(self._own("value", name), below)]

    def undividable(self, below: float = SMALL_GAIN) -> list[str]:
        """Those of them whose bias has no reader to go into: it would have to be divided by that gain."""
        small = set(self.fragile_gains(below))
        biased = [f.norm.name for f in self.folds if not f.bias_too and f.norm.name + ".bias" in self.model.layouts]
        return [name for name in biased if name in small]

    # --- forward: raw -> canonical ----------------------------------------------------------------------------------
    def tensor(self, name: str) -> Tensor:
        """The canonical tensor in float64."""
        if name in self.norm_weight:
            return torch.full_like(self.model.raw(name), 1.0 - self.norm_weight[name].norm.offset)
        if name in self.norm_bias:
            fold = self.norm_bias[name]
            bias = self.model.raw(name)
            return torch.zeros_like(bias) if fold.bias_too else bias / self.gain(fold.norm)
        if name in self.scales.kept:
            return self.scales.canonical_value(name, self.model.raw(name))
        tensor = self._uncentred(name)
        for segment in self._dropped_segments(name):
            tensor = _filled(tensor, segment, torch.zeros(()))
        if name in self.centred or name in self.centred_readers:
            axis, length = self._mean_axis(name)
            tensor = tensor - _spread(_mean(tensor, axis, length), axis, length)
        return tensor

    def _uncentred(self, name: str) -> Tensor:
        tensor = self.model.raw(name, self._precision(name))
        if name in self.reader_fold:
            tensor = _scaled(tensor, self._reads(name), self.gain(self.reader_fold[name].norm))
        if moved := self._reader_with_shift(name):
            weight, norm = moved
            shift = self._own("value", norm.name + ".bias")
            tensor = tensor + self._read_by(weight, self.model.raw(weight), shift)
        for gauge in self._value_biases_into(name):
            tensor = tensor + self._passed_on(gauge, self._uncentred(gauge.bias), self.model.raw(gauge.output))
        factor = self.scales.factor(name, self._value)
        return tensor if factor is None else _scaled(tensor, 0, factor)

    def _precision(self, name: str) -> torch.dtype:
        """float64, except where nothing but one group element will touch a float32 tensor: that rounds once anyway."""
        return torch.float64 if self.moving or not self.model.is_single(name) else torch.float32

    # --- inverse: canonical -> the gauge of this model --------------------------------------------------------------
    def in_gauge(self, name: str, canonical: Provider) -> Tensor:
        """A canonical model's tensor, written in the gauge of *this* model: its norms, means and biases."""
        if name in self.norm_weight:
            return self._own("value", name)
        if name in self.norm_bias:
            fold = self.norm_bias[name]
            return self._own("value", name) if fold.bias_too else canonical(name) * self.gain(fold.norm)
        if name in self.scales.kept:
            return self._own("value", name)
        tensor = canonical(name)
        if name in self.centred or name in self.centred_readers:
            tensor = _add_common(tensor, _spread(self._own("mean", name), *self._mean_axis(name)))
        factor = self.scales.factor(name, self._value)
        if factor is not None:
            tensor = _scaled(tensor, 0, 1 / factor)
        if name in self.reader_fold:
            tensor = _scaled(tensor, self._reads(name), 1 / self.gain(self.reader_fold[name].norm))
        for segment in self._dropped_segments(name):
            tensor = _filled(tensor, segment, segment.take(self._own("bias", name), 0))
        for gauge in self._value_biases_into(name):
            weight = self.in_gauge(gauge.output, canonical)
            tensor = tensor - self._passed_on(gauge, self._own("bias", gauge.bias), weight)
        if moved := self._reader_with_shift(name):
            weight_name, norm = moved
            shift = self._own("value", norm.name + ".bias")
            tensor = tensor - self._read_by(weight_name, self.in_gauge(weight_name, canonical), shift)
        return tensor

    # --- small pieces -----------------------------------------------------------------------------------------------
    def _value(self, name: str) -> Tensor:
        return self._own("value", name)

    def _mean_axis(self, name: str) -> tuple[int, int]:
        """The axis along which a LayerNorm drops a mean, and over how many entries."""
        if name not in self.centred_readers:
            axis = self._place(name, dual=False)[0]
            return axis, self.model.layouts[name].shape[axis]
        norm = self.reader_fold[name].norm.name + ".weight"
        return self._reads(name), self.model.layouts[norm].shape[0]

    def _reads(self, name: str) -> int:
        """The axis by which a tensor reads what its norm gives."""
        axis = self._read_axis(name, self._normed(self.reader_fold[name].norm))
        assert axis is not None, name
        return axis

    def _read_axis(self, name: str, space: str) -> int | None:
        """The same of a space: a stream (once or in several copies), the whole of its space, or a space inside heads,
        where one gain serves all."""
        if is_stream(space):
            axis, stream = self._place(name, dual=True)
            return axis if stream == space else None
        layout = self.model.layouts[name]
        if (whole := layout.axis_of(space, dual=True)) is not None:
            return whole
        inner = [n for n, axis in enumerate(layout.axes) if len(axis) == 1 and axis[0].atoms[-1].space == space]
        return inner[0] if inner else None

    def _normed(self, norm: Norm) -> str:
        """The stream a norm is on, of however many, or the space inside a layer."""
        return self._stream(norm.name + ".weight", dual=False) if is_stream(norm.space) else norm.space

    def _stream(self, name: str, *, dual: bool) -> str:
        return self._place(name, dual=dual)[1]

    def _place(self, name: str, *, dual: bool) -> tuple[int, str]:
        """The axis by which a tensor writes a stream, or reads it once or in several copies; (-1, "") for none."""
        for number, axis in enumerate(self.model.layouts[name].axes):
            last = {(s.atoms[-1].space, s.atoms[-1].dual) for s in axis}
            before = [atom for segment in axis for atom in segment.atoms[:-1]]
            if len(last) == 1 and all(atom.free for atom in before):
                space, is_dual = last.pop()
                if is_stream(space) and is_dual == dual:
                    return number, space
        return -1, ""

    def _reader_with_shift(self, bias: str) -> tuple[str, Norm] | None:
        """The weight through which the bias of a norm moves into this bias, and that norm."""
        weight = bias.removesuffix("bias") + "weight"
        fold = self.reader_fold.get(weight) if bias.endswith(".bias") else None
        if fold is None or not fold.bias_too or fold.norm.name + ".bias" not in self.model.layouts:
            return None
        return weight, fold.norm

    def _read_by(self, weight: str, values: Tensor, shift: Tensor) -> Tensor:
        axis = self._reads(weight)
        copies = values.shape[axis] // len(shift)
        read: Tensor = torch.tensordot(values, shift.repeat(copies), dims=([axis], [0]))
        return read.flatten(1).sum(1) if read.ndim > 1 else read  # a constant is the same under a whole kernel

    def _value_biases_into(self, bias: str) -> list[ValueBias]:
        return [g for g in self.values if self.model.bias_of(g.output) == bias]

    def _passed_on(self, gauge: ValueBias, bias: Tensor, output: Tensor) -> Tensor:
        """Σ_h O_h b_v,h"""
        axis, reader, vector = self.value_as_read(gauge, bias)
        columns = reader.take(output, axis).flatten(0, len(reader.sizes) - 1)
        passed: Tensor = torch.tensordot(vector.flatten(), columns, dims=1)
        return passed

    def value_as_read(self, gauge: ValueBias, bias: Tensor) -> tuple[int, Segment, Tensor]:
        """The axis and segment by which the output projection reads a value bias, and the bias there: with grouped
        queries, once for every query head of a group."""
        value = next(s for s in self.model.layouts[gauge.bias].axes[0] if s.atoms[-1].space == gauge.space)
        axes = enumerate(self.model.layouts[gauge.output].axes)
        axis, reader = next((n, s) for n, axis in axes for s in axis if s.atoms[-1].space == gauge.space)
        names = [a.space for a in value.atoms]
        shape = [n if a.space in names else 1 for a, n in zip(reader.atoms, reader.sizes, strict=True)]
        return axis, reader, value.take(bias, 0).reshape(shape).expand(reader.sizes)

    def _dropped_segments(self, bias: str) -> list[Segment]:
        """The segments of a bias that the canonical form sets to zero."""
        wanted = {(g.space, True) for g in self.keys if g.bias == bias}
        wanted |= {(g.space, False) for g in self.values if g.bias == bias}
        if not wanted:
            return []
        return [s for s in self.model.layouts[bias].axes[0] if (s.atoms[-1].space, s.atoms[-1].dual) in wanted]


class AnchorGauge(dict[str, Tensor]):
    """The anchor's gauge, entry by entry on demand; tensors only the source has keep the source's own."""

    def __init__(self, anchor: Canonical, source: Canonical) -> None:
        super().__init__()
        self.anchor, self.source = anchor, source

    def __missing__(self, key: str) -> Tensor:
        kind, name = key.split(":", 1)
        owner = self.anchor if name in self.anchor.model.layouts else self.source
        return owner._own(kind, name)


def _too_small(gain: Tensor, below: float) -> bool:
    """Some gain cannot be divided by."""
    size = gain.abs()
    return bool(((size < below * size.median()) | (size == 0)).any())  # the median may be zero itself


def _scaled(tensor: Tensor, axis: int, factor: Tensor) -> Tensor:
    """Times a factor per entry of an axis, which may hold several copies of the stream."""
    factor = factor.repeat(tensor.shape[axis] // len(factor))
    return tensor * factor.reshape([-1 if k == axis else 1 for k in range(tensor.ndim)])


def _mean(tensor: Tensor, axis: int, length: int) -> Tensor:
    """The mean over every `length` entries of an axis."""
    copies = tensor.shape[axis] // length
    shape = (*tensor.shape[:axis], copies, length, *tensor.shape[axis + 1 :])
    return tensor.reshape(shape).mean(axis + 1)


def _spread(mean: Tensor, axis: int, length: int) -> Tensor:
    """Back to what the mean was taken of, as far as broadcasting does not do it."""
    return mean if mean.shape[axis] == 1 else mean.repeat_interleave(length, axis)


def _filled(tensor: Tensor, segment: Segment, values: Tensor) -> Tensor:
    result = tensor.clone()
    target = segment.take(tensor, 0)
    segment.put(result, 0, values.to(tensor).expand_as(target))
    return result


def _add_common(tensor: Tensor, mean: Tensor) -> Tensor:
    """Add the anchor's means; rows the anchor does not have (a longer position table) keep a mean of zero."""
    if all(m in (1, t) for m, t in zip(mean.shape, tensor.shape, strict=True)):
        return tensor + mean
    result = tensor.clone()
    sizes = list(zip(mean.shape, tensor.shape, strict=True))
    rows = tuple(slice(0, t if m == 1 else min(m, t)) for m, t in sizes)
    result[rows] += mean[tuple(slice(0, min(m, t)) for m, t in sizes)]
    return result
