"""Sizes, dtypes and casts."""

from __future__ import annotations

import pytest
import torch

from isomerge.checkpoint import CastReport, cast, parse_dtype, parse_size
from isomerge.errors import RequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("512MB", 512 * 10**6),
        ("1GiB", 2**30),
        ("1.5kb", 1500),
        ("2 TB", 2 * 10**12),
        ("700", 700),
        (9, 9),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "5B", "-1GB", "0", True, "0.0001KB", "5", " 99 "])
def test_bad_sizes_come_with_examples(text):
    with pytest.raises(RequestError, match="5GB, 512MB or 1GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("BFloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("half", torch.float16),
        ("fp32", torch.float32),
        ("double", torch.float64),
        (torch.float32, torch.float32),
    ],
)
def test_dtypes(text, dtype):
    assert parse_dtype(text) == dtype


def test_bad_dtypes_are_corrected():
    with pytest.raises(RequestError, match="Did you mean 'bfloat16'"):
        parse_dtype("bloat16")
    with pytest.raises(RequestError):
        parse_dtype("int8")


def test_a_cast_counts_what_it_loses():
    tensor = torch.tensor([0.0, 1.0, 1e6, -1e6, 1e-12, float("inf")], dtype=torch.float64)
    result, report = cast(tensor, torch.float16)
    assert result.dtype == torch.float16 and report == CastReport(6, overflow=2, underflow=1, finite=False)
    assert not report.lossless and report + report == CastReport(12, 4, 2, False)


@pytest.mark.parametrize(("source", "target"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_wider_type_loses_nothing(source, target):
    result, report = cast(torch.tensor([1.0, 3e-5]).to(source), target)
    assert result.dtype == target and report.lossless and report.values == 2


def test_integers_are_not_cast():
    with pytest.raises(RequestError, match="floating-point"):
        cast(torch.arange(3), torch.float16)
