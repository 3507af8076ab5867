"""What each step of a run leaves: its weights, its numbers and its samples."""

from typing import Any

import numpy as np
import torch

from trainer.callback import Callback


class Steps(Callback):
    """Tells the recipe the step, too."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step_end(self, trainer) -> None:
        trainer.recipe.step = trainer.step
        assert len(trainer.losses) == len(trainer.data.weights)
        self.steps.append(
            {
                "weights": torch.cat([p.detach().flatten() for p in trainer.parameters]).numpy().tobytes(),
                "loss": trainer.metrics["train/loss"],
                "norm": trainer.metrics.get("train/grad_norm", 0.0),
                "refs": [tuple(ref) for ref in trainer.data.refs],
                "micros": len(trainer.data.weights),
            }
        )


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the weights of two steps, in float64."""
    first, second = (np.frombuffer(step["weights"]) for step in (one, other))
    return float(abs(first - second).max())


def bits(ranks: Any) -> list[set[bytes]]:
    """The ranks' weights after each step: one where all are equal."""
    return [{rank["steps"][step]["weights"] for rank in ranks} for step in range(len(ranks[0]["steps"]))]
