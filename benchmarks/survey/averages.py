"""The plain mean, and what bounds it

Of two image classifiers trained apart and of three fine-tuned from one base: each alone, their mean, and the mean of
their probabilities. The rows that every other table of this folder is read beside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from setting import Models, Row, main

import isomerge


def rows(models: Models, seed: int) -> Iterator[Row]:
    for kind, folders in (("trained apart", models.strangers), ("fine-tuned from one base", models.siblings)):
        scores = [models.score(folder) for folder in folders]
        yield {"row": f"{kind}: one model (mean)", **{k: sum(s[k] for s in scores) / len(scores) for k in scores[0]}}
        out = models.folder / f"mean of {kind}"
        isomerge.merge([str(f) for f in folders]).save(out, report=False, lock=False)
        yield {"row": f"{kind}: plain mean", **models.score(out)}
        together = torch.stack([models.logits(folder).softmax(-1) for folder in folders]).mean(0).log()
        loss = float(torch.nn.functional.nll_loss(together.double(), models.labels["test"]))
        yield {"row": f"{kind}: ensemble", "accuracy": models.accuracy(together), "loss": loss}


if __name__ == "__main__":
    main(__doc__, rows)
