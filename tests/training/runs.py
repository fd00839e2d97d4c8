"""A real, short training of a tiny model with the stock Trainer, and what it was like at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

Weights = dict[str, np.ndarray]


def small_model(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def arrays(model: torch.nn.Module) -> Weights:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in model.state_dict().items()}


class Watch(TrainerCallback):
    """What the callbacks before it left in the model, after every step."""

    def __init__(self) -> None:
        self.begin: Weights = {}
        self.after: list[Weights] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin = arrays(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after.append(arrays(kwargs["model"]))


def trainer(
    folder: Path, *callbacks: TrainerCallback, seed: int = 0, steps: int = 12, rate: float = 1e-2, **arguments: Any
) -> Trainer:
    """`steps` of AdamW at a constant rate."""
    model = small_model(seed)
    draw = torch.Generator().manual_seed(seed)
    examples = [
        {"input_ids": torch.randint(0, 30, (6,), generator=draw), "labels": torch.tensor(i % 2)} for i in range(24)
    ]
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=steps, learning_rate=rate, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
        **{"save_strategy": "no", **arguments},
    )  # fmt: skip
    return Trainer(model, settings, train_dataset=examples, eval_dataset=examples[:8], callbacks=list(callbacks))


def train(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> BertForSequenceClassification:
    made = trainer(folder, *callbacks, **settings)
    made.train()
    return made.model  # type: ignore[return-value]


def assert_near(found: Weights, expected: Weights, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=tolerance, rtol=0, err_msg=name)
