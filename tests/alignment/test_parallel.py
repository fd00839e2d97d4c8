"""Work in threads: in order, all of it, the same error whoever meets it, and nothing queued is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from isomerge import threads
from isomerge.threads import ahead, parallel


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 100])
def test_results_are_complete_and_in_order(count: int, length: int) -> None:
    with parallel(count) as run:
        assert run(lambda x: x * x, range(length)) == [x * x for x in range(length)]
    assert list(ahead(lambda x: x * x, range(length), count)) == [x * x for x in range(length)]


def test_short_work_stays_in_one_thread_and_long_work_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "DOUBLING", 60.0)
    seen: set[int] = set()
    with parallel(4) as run:
        run(lambda _: seen.add(threading.get_ident()), range(50))
    assert len(seen) == 1
    monkeypatch.setattr(threads, "DOUBLING", 0.001)
    together = threading.Barrier(4, timeout=60)  # passes only if four threads wait at it
    with parallel(4) as run:
        run(lambda _: together.wait(), range(4))
    assert not together.broken


def test_what_nobody_takes_is_not_computed() -> None:
    begun: list[int] = []
    found = ahead(lambda n: begun.append(n) or n, range(1000), 2)
    assert [next(found), next(found)] == [0, 1]
    found.close()  # type: ignore[attr-defined]
    assert len(begun) < 10


def test_an_interrupt_does_not_wait_for_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def work(n: int) -> None:
        time.sleep(0.01)
        done.append(n)

    monkeypatch.setattr(threads, "wait", interrupted)  # where the main thread is while others work
    with pytest.raises(KeyboardInterrupt), parallel(2) as run:
        run(work, range(1000))
    assert len(done) < 10


def test_the_first_error_in_order_is_raised_and_the_rest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "DOUBLING", 0.0)
    done: list[int] = []

    def work(n: int) -> None:
        if n == 1:
            time.sleep(0.05)  # the second error is met before the first
            raise ValueError("one")
        if n == 2:
            raise ValueError("two")
        time.sleep(0.001)
        done.append(n)

    with pytest.raises(ValueError, match="one"), parallel(3) as run:
        run(work, range(1000))
    assert len(done) < 500
