"""What both engines promise of a map, and what is refused before any work."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from isomerge.engine import Threads, engine_of
from isomerge.errors import CheckpointError, RequestError


def test_threads_report_every_unit_and_raise_the_first_error() -> None:
    found: dict[int, int] = {}
    Threads().each(lambda unit: unit * unit, [3, 4, 5], found.__setitem__, threads=2)
    assert found == {0: 9, 1: 16, 2: 25}
    stopped = threading.Event()
    with pytest.raises(ZeroDivisionError):
        Threads().each(lambda unit: 1 // unit, [1, 0, 2], found.__setitem__, threads=1, stopped=stopped)
    assert stopped.is_set()


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r'pip install "isomerge\[ray\]"') as caught:
        engine_of("ray")
    assert caught.value.module == "ray"


def test_an_address_that_nobody_answers_at_is_refused_soon() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RequestError, match=r"127\.0\.0\.1:9.*nothing answers there"):
        engine_of("ray", "127.0.0.1:9")
    with pytest.raises(RequestError, match="Name the head node as HOST:PORT"):
        engine_of("ray", "ray://somewhere:10001")


def test_an_address_without_ray_and_unknown_engines_are_refused() -> None:
    with pytest.raises(RequestError, match="Set engine to 'ray'"):
        engine_of("threads", "10.0.0.1:6379")
    with pytest.raises(RequestError, match="Did you mean 'threads'"):
        engine_of("thread")


@pytest.mark.slow
def test_the_cluster_maps_in_order_and_raises_what_a_unit_raised(cluster) -> None:
    with engine_of("ray").parallel() as run:
        told: list[int] = []
        assert run(lambda unit: unit * unit, [3, 4, 5], told.append) == [9, 16, 25]
        assert sorted(told) == [0, 1, 2]

        def fail(unit: int) -> int:
            if unit == 4:
                raise RequestError(f"unit {unit} is wrong", keys=("unit",))
            return unit

        with pytest.raises(RequestError, match="^unit 4 is wrong$") as caught:
            run(fail, [3, 4, 5])
        assert caught.value.keys == ("unit",)


@pytest.mark.slow
def test_a_node_that_does_not_see_a_folder_is_named_with_it(cluster, tmp_path: Path) -> None:
    import socket

    hidden = tmp_path / "not-mounted-there"
    with pytest.raises(CheckpointError, match=f"node {socket.gethostname()} does not see {hidden}"):
        engine_of("ray").each(abs, [1], lambda *_: None, visible=[hidden])


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from isomerge.engine import ray_cluster

    other = {**ray_cluster.installed_versions("0.1.0")}
    monkeypatch.setattr(ray_cluster, "installed_versions", lambda _: other)
    with pytest.raises(RequestError, match=r"has isomerge .*, and the driver has 0\.1\.0"):
        engine_of("ray").each(abs, [1], lambda *_: None)
