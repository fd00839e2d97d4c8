"""Algorithm 1 of Cha et al. 2021 (arXiv 2102.08604), line by line, with iterations counted from 1."""

from __future__ import annotations

from collections.abc import Sequence


def window_of(losses: Sequence[float], N_s: int, N_e: int, r: float) -> tuple[int, int] | None:
    """Places from 0, the second exclusive; None where the paper's threshold is never set."""
    E = dict(enumerate(losses, start=1))
    T = len(E)
    t_s, t_e, threshold = 0, T, None
    for i in range(1, T + 1):
        if threshold is None:
            if i >= N_s and E[i - N_s + 1] == min(E[i - k] for k in range(N_s)):
                t_s = i - N_s + 1
                threshold = r / N_s * sum(E[i - k] for k in range(N_s))
        elif i >= N_e and threshold < min(E[i - k] for k in range(N_e)):
            t_e = i - N_e
            break
    return None if threshold is None else (t_s - 1, t_e)
