"""What goes past the system's cache lies where it belongs, byte for byte."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from isomerge import system
from isomerge.checkpoint import direct
from isomerge.checkpoint.direct import DirectFile

SIZE = 5 * direct.LEAST


@pytest.fixture
def pieces():
    """Of one file: pieces at odd places, some too small to go past the cache."""
    content = os.urandom(SIZE)
    edges = [0, 13, 13 + 2 * direct.LEAST, 14 + 2 * direct.LEAST, 100 + 3 * direct.LEAST, SIZE]
    return content, [(start, content[start:stop]) for start, stop in itertools.pairwise(edges)]


def put(path, pieces):
    """As the writer does: whole pages directly, the ends through the cache; how many bytes went directly."""
    path.write_bytes(bytes(SIZE))
    past = DirectFile(path)
    directly = 0
    with path.open("r+b") as file:
        for start, piece in pieces:
            view = memoryview(piece)
            begin, end = past.write(view, start)
            directly += end - begin
            for place, part in ((start, view[:begin]), (start + end, view[end:])):
                assert system.write_at(file.fileno(), part, place) == len(part)
    past.close()
    return directly


def test_pieces_at_odd_places_make_the_whole_file(tmp_path, pieces, monkeypatch):
    content, parts = pieces
    monkeypatch.setattr(direct, "BUFFER", direct.LEAST)  # several writes for a piece
    directly = put(tmp_path / "out", parts)
    assert (tmp_path / "out").read_bytes() == content
    assert directly > 3 * direct.LEAST or system.open_past_cache(tmp_path / "out") is None


def test_a_disk_that_takes_a_part_of_each_write_gets_the_rest(tmp_path, pieces, monkeypatch):
    content, _ = pieces
    (tmp_path / "out").write_bytes(bytes(SIZE))
    past, whole = DirectFile(tmp_path / "out"), system.write_at
    part = 3 * direct.PAGE
    monkeypatch.setattr(system, "write_at", lambda file, view, place: whole(file, view[:part], place))
    begin, end = past.write(memoryview(content), 0)
    is_possible = past._descriptor is not None
    past.close()
    assert (begin, end) == ((0, SIZE) if is_possible else (0, 0))
    assert (tmp_path / "out").read_bytes()[begin:end] == content[begin:end]


@pytest.mark.parametrize(("number", "is_refusal"), [(errno.EINVAL, True), (errno.ENOSPC, False)])
def test_a_disk_without_such_writes_is_no_error_and_a_full_one_is(tmp_path, pieces, monkeypatch, number, is_refusal):
    content, _ = pieces
    (tmp_path / "out").write_bytes(bytes(SIZE))
    past = DirectFile(tmp_path / "out")
    if past._descriptor is None:
        pytest.skip("this disk has no such writes")

    def fails(*_):
        raise OSError(number, "no")

    monkeypatch.setattr(system, "write_at", fails)
    if is_refusal:
        assert past.write(memoryview(content), 0) == (0, 0)
    else:
        with pytest.raises(OSError):
            past.write(memoryview(content), 0)
    past.close()
