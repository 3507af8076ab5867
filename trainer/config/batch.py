"""Splits a batch: global samples = ranks x micro-batch x accumulation steps. Imports no torch."""

from trainer.errors import ConfigError


def split_batch(
    batch: int, world: int, micro_batch: int | None, accumulate: int | None, uneven: bool = False
) -> tuple[int, int]:
    """Split a global `batch` over `world` ranks; return the largest micro-batch, and the micro-batches per step.

    With `uneven`, the number of ranks may change, so their shares may differ by a sample. `micro_batch` is then an
    upper limit, from which `accumulate` follows.
    """
    for key, value in (("batch", batch), ("micro_batch", micro_batch), ("accumulate", accumulate)):
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: must be at least 1")
    if uneven:
        return _split_unevenly(batch, world, micro_batch, accumulate)
    known = {"micro_batch": micro_batch, "accumulate": accumulate}
    unit = world * (micro_batch or 1) * (accumulate or 1)
    wrong = batch != unit if micro_batch and accumulate else batch % unit
    if wrong:
        given = "".join(f", {key}={value}" for key, value in known.items() if value)
        low = batch // unit * unit
        nearest = [unit] if micro_batch and accumulate else [b for b in (low, low + unit) if b]
        raise ConfigError(
            f"batch={batch}: does not divide into {world} rank(s){given}; nearest that do: "
            + ", ".join(f"batch={b}" for b in nearest)
            + _other_sizes(batch, world, known)
        )
    micro = micro_batch or batch // (world * (accumulate or 1))
    return micro, batch // (world * micro)


def _split_unevenly(batch: int, world: int, micro_batch: int | None, accumulate: int | None) -> tuple[int, int]:
    if batch < world:
        raise ConfigError(
            f"batch={batch}: is less than a sample for each of {world} ranks; use fewer ranks, or a larger batch"
        )
    part = -(-batch // world)  # the largest share
    micro = micro_batch or -(-part // (accumulate or 1))
    times = min(-(-part // micro), batch // world)  # so that smaller parts have no empty micro-batch
    return -(-part // times), times


def _other_sizes(batch: int, world: int, known: dict[str, int | None]) -> str:
    """Suggest the nearest values of the other two keys for which this batch is divisible."""
    if batch % world:
        return ""
    divisors = [d for d in range(1, batch // world + 1) if batch // world % d == 0]
    options = [
        f"{key}={min(divisors, key=lambda d: abs(d - value))}" for key, value in known.items() if value is not None
    ]
    both = known["micro_batch"] and known["accumulate"]
    return f"; or {'one of ' if both else ''}{' or '.join(options)}" + (" alone" if both else "") if options else ""
