"""What DDP only does after a first pass, and which of its layouts is the fastest: settled before the first step."""

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trainer.log import log
from trainer.parallel.ddp import buckets, distribute

if TYPE_CHECKING:
    from trainer.trainer import Trainer


TIMED = 5  # passes for each of `trainer.tries`


def rehearse(trainer: "Trainer", batch: Any) -> None:
    """Discarded forward and backward passes on `batch`, with `trainer.rehearsing` set.

    DDP lays its buckets out anew after the first pass of each process, and the layout decides the order of summation:
    without this a resumed run differs in its last bits from 3 ranks up.

    Where a callback has put arguments of DDP into `trainer.tries`, the fastest of them are taken. One that learns from
    the passes may ask for more: `trainer.passes`.
    """
    trainer.rehearsing = True
    buffers = [buffer.clone() for buffer in trainer.module.buffers()]
    if trainer.tries:
        lay_out(trainer, fastest(trainer, batch))
    settle(trainer, batch, trainer.passes)
    for buffer, before in zip(trainer.module.buffers(), buffers, strict=True):
        buffer.copy_(before)
    trainer.rehearsing = False


def settle(trainer: "Trainer", batch: Any, passes: int) -> None:
    for _ in range(max(passes, 3) if trainer.ddp["static_graph"] else passes):  # its layout comes after the second
        run_pass(trainer, batch)


def run_pass(trainer: "Trainer", batch: Any) -> None:
    trainer.loss_of(trainer.model, batch).backward()
    trainer.optimizer.zero_grad(set_to_none=True)


def lay_out(trainer: "Trainer", arguments: dict[str, Any]) -> None:
    """Another DDP. The one before goes first: with it, its hooks on parameters and its buckets."""
    trainer.ddp |= arguments
    trainer.model = trainer.module
    gc.collect()
    trainer.model = distribute(trainer)


def fastest(trainer: "Trainer", batch: Any) -> dict[str, Any]:
    """Of `trainer.tries`, by the median of each pass's slowest rank; of the same layouts, the first. A collective."""
    layouts: list[list[list[int]]] = []
    measured: list[tuple[float, dict[str, Any]]] = []
    for arguments in trainer.tries:
        lay_out(trainer, arguments)
        settle(trainer, batch, 2)
        layout = buckets(trainer.model)
        if layout not in layouts or not layout:  # unknown with find_unused_parameters
            layouts.append(layout)
            times = trainer.ranks.gather([time_pass(trainer, batch) for _ in range(TIMED)])
            measured.append((median(map(max, zip(*times, strict=True))), arguments))
    _, chosen = min(measured, key=lambda one: one[0])
    told = ", ".join(f"{s * 1000:.1f} ms at {arguments['bucket_cap_mb']:.4g} MiB" for s, arguments in measured)
    log.info("rehearsal: a pass takes %s: buckets of %.4g MiB", told, chosen["bucket_cap_mb"])
    return chosen


def time_pass(trainer: "Trainer", batch: Any) -> float:
    """In seconds, from when all ranks are ready. A collective."""
    wait(trainer.device)
    trainer.ranks.gather(None)
    began = time.monotonic()
    run_pass(trainer, batch)
    wait(trainer.device)
    return time.monotonic() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
