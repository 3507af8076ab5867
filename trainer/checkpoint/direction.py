"""Warns if a run looks for the smallest accuracy or the largest loss: the names of metrics tell which is better."""

from trainer.log import log

LARGER = ("accuracy", "auc", "auroc", "f1", "dice", "bleu", "rouge")
SMALLER = ("loss", "error", "perplexity")  # also with a word of the others: dice_loss


def warn_of_direction(key: str, metric: str, larger: bool, way_out: str) -> None:
    """Warn if the metric is usually better the other way.

    Args:
        key: The setting, for the line.
        larger: Whether the run takes larger values as better.
        way_out: The setting that turns it round.
    """
    small = any(word in metric.lower() for word in SMALLER)
    large = not small and any(word in metric.lower() for word in LARGER)
    if small and larger:
        log.warning("%s: takes larger as better, and smaller is usual for %s; give %s", key, metric, way_out)
    if large and not larger:
        log.warning("%s: takes smaller as better, and larger is usual for %s; give %s", key, metric, way_out)
