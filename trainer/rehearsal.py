"""What DDP only does after a first pass, done before the first step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def rehearse(trainer: "Trainer", batch: Any) -> None:
    """Discarded forward and backward passes on `batch`, with `trainer.rehearsing` set.

    DDP lays its buckets out anew after the first pass of each process, and the layout decides the order of summation:
    without this a resumed run differs in its last bits from 3 ranks up.
    """
    trainer.rehearsing = True
    buffers = [buffer.clone() for buffer in trainer.module.buffers()]
    for _ in range(3 if trainer.ddp["static_graph"] else 2):  # a static graph's layout comes after the second
        trainer.loss_of(trainer.model, batch).backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(trainer.module.buffers(), buffers, strict=True):
        buffer.copy_(before)
    trainer.rehearsing = False
