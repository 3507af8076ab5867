"""Guesses from a metric's name whether larger or smaller values are better."""

import re

from trainer.log import log

LARGER = {"acc", "accuracy", "auc", "auroc", "f1", "dice", "bleu", "rouge", "rouge1", "rouge2", "rougel", "precision"}
LARGER |= {"recall", "mfu", "psnr"}
SMALLER = {"loss", "error", "perplexity", "ppl", "wer", "mae", "mse", "rmse", "nats", "bits"}
NEITHER = {"scale", "weight"}  # of a loss
WORD = re.compile("[A-Z]+[0-9]+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*|[0-9]+")  # BinaryF1Score has three


def usual(metric: str) -> int:
    """Return 1 if larger values of the metric are better, -1 if smaller ones are, and 0 if the name gives no hint."""
    words = {word.lower() for word in WORD.findall(metric.rpartition("/")[2])}
    if words & NEITHER:
        return 0
    return -1 if words & SMALLER else 1 if words & LARGER else 0  # dice_loss is a loss


def warn_of_direction(key: str, metric: str, larger: bool, fix: str) -> None:
    """Warn if the run compares the metric of `key` the other way than usual; `fix` is the setting that reverses it."""
    if usual(metric) == (-1 if larger else 1):
        one, other = ("larger", "smaller") if larger else ("smaller", "larger")
        log.warning("%s: takes %s as better, and %s is usual for %s; give %s", key, one, other, metric, fix)
