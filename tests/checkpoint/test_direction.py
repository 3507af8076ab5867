"""Which metrics are warned of."""

import pytest

from trainer.checkpoint.direction import warn_of_direction
from trainer.log import log


@pytest.mark.parametrize(
    ("metric", "larger", "told"),
    [
        ("val/accuracy", False, ["key: takes smaller as better, and larger is usual for val/accuracy; give way"]),
        ("val/BinaryAUROC", False, ["key: takes smaller as better, and larger is usual for val/BinaryAUROC; give way"]),
        (
            "val/BinaryF1Score",
            False,
            ["key: takes smaller as better, and larger is usual for val/BinaryF1Score; give way"],
        ),
        ("val/F1", False, ["key: takes smaller as better, and larger is usual for val/F1; give way"]),
        ("val/f1_score", False, ["key: takes smaller as better, and larger is usual for val/f1_score; give way"]),
        ("val/rouge1", False, ["key: takes smaller as better, and larger is usual for val/rouge1; give way"]),
        ("val/acc", False, ["key: takes smaller as better, and larger is usual for val/acc; give way"]),
        ("val/loss", True, ["key: takes larger as better, and smaller is usual for val/loss; give way"]),
        ("val/dice_loss", False, []),
        ("val/lossless_ratio", True, []),
        ("train/loss_scale", True, []),
        ("val/accuracy", True, []),
        ("val/x", True, []),
    ],
)
def test_a_metric_that_is_better_the_other_way(metric, larger, told, monkeypatch):
    lines = []
    monkeypatch.setattr(log, "warning", lambda text, *args: lines.append(text % args))
    warn_of_direction("key", metric, larger, "way")
    assert lines == told
