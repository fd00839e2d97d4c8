"""Stacked: a linear model on the members' log-probabilities, fitted on held-out predictions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isomerge.ensembling.combinations.combination import Shares, Stack, combination

STEPS = 500


@combination(weighs=False, finds="stack", reference="https://doi.org/10.1016/S0893-6080(05)80023-1")
def stacked(logs: Tensor, shares: Shares) -> Tensor:
    """Stacking: p = softmax(A x + b), x the log-probabilities of all members.

    It can learn which member to believe about which class. That takes held-out examples of every class; with few of
    them it stays near the mean logit, from which its penalty pulls nothing away.
    """
    assert shares.stack is not None
    rows = logs.movedim(0, -2).flatten(-2)  # (rows…, members · classes)
    return (rows @ shares.stack.matrix.to(logs).T + shares.stack.bias.to(logs)).log_softmax(-1)


def find_stack(logs: Tensor, targets: Tensor, ridge: float) -> Stack:
    """min over A, b of mean_n −log softmax(A x_n + b)[y_n] + ridge/2 (‖A − A₀‖² + ‖b‖²), by L-BFGS in float64.

    A₀ is the mean logit. The function is convex, and with a ridge above zero there is one minimum.
    """
    members, rows, classes = logs.shape
    inputs = logs.double().movedim(0, 1).flatten(1)
    start = torch.eye(classes, dtype=inputs.dtype, device=inputs.device).repeat(1, members) / members
    base, with_one = inputs @ start.T, torch.cat([inputs, inputs.new_ones(rows, 1)], 1)
    # Members agree on most examples; in coordinates where their differences are as large as the rest it is well posed.
    size = with_one.T @ with_one / rows / classes
    root = torch.linalg.cholesky(size + ridge * torch.eye(len(size), dtype=size.dtype, device=size.device))
    scaled = torch.zeros(len(size), classes, dtype=inputs.dtype, device=inputs.device, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [scaled], max_iter=STEPS, history_size=20, tolerance_grad=1e-9, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def change() -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(root.T, scaled, upper=True)
        return found

    def closure() -> Tensor:
        optimiser.zero_grad()
        with torch.enable_grad():
            now = change()
            loss = cross_entropy(base + with_one @ now, targets) + ridge / 2 * now.square().sum()
            loss.backward()
        return loss.detach()

    optimiser.step(closure)
    found = change().detach().T
    return Stack(start + found[:, :-1], found[:, -1])
