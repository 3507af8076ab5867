"""Measures peak memory, limits what the process may take of a GPU, and advises when memory runs out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from trainer.annotated import AtLeast, AtMost, PositiveFloat
from trainer.callback import Callback, Role, only_logged
from trainer.config.compose import CONF
from trainer.context import Context
from trainer.errors import ConfigError, is_out_of_memory
from trainer.log import log
from trainer.monitors.candidates import accepts
from trainer.monitors.memory import allocator
from trainer.monitors.memory.advice import Setting, Use, advise, count_state, size
from trainer.parallel.blocks import find_blocks

ALONE = ("activation_checkpoint", "auto_batch", "optimizer_in_backward")
CANDIDATES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ALONE]
CANDIDATES += [("shard", {"stage": stage}) for stage in (1, 2, 3)]
EVENTS = 100_000  # allocations that a snapshot has; some hundred bytes of host memory each


class Memory(Callback):
    """Adds `perf/peak_memory_gib`: GiB of tensors on the GPU at the peak, of the rank with the most.

    On a CPU, `perf/peak_rss_gib` is the resident memory of the process (VmHWM), without data workers. With several
    ranks, `perf/memory_skew` is the share by which the smallest peak is below the largest.

    Args:
        max_share: Share of the GPU's memory that the process may take. Above it, torch raises OutOfMemoryError.
        expandable_segments: Segments of the allocator grow, which leaves fewer gaps. null: torch's setting.
        max_split_mib: Blocks above this size are not split. null: torch's setting.
        snapshot: Record allocations, and write torch's snapshot of them to the run's logs when memory runs out.
    """

    role = Role.MEASURE

    def __init__(
        self,
        max_share: Annotated[PositiveFloat, AtMost(1)] | None = None,
        expandable_segments: bool | None = None,
        max_split_mib: Annotated[int, AtLeast(20)] | None = None,
        snapshot: bool = False,
    ) -> None:
        self.max_share, self.snapshot = max_share, snapshot
        self.wanted = {"expandable_segments": expandable_segments, "max_split_size_mb": max_split_mib}
        self.wanted = {key: str(value) for key, value in self.wanted.items() if value is not None}
        self.watch: allocator.Watch | None = None

    def build_model(self, trainer, build: Callable[[], nn.Module]) -> nn.Module:
        """Set the allocator up: nothing is on the device yet."""
        asked = {"max_share": self.max_share, **self.wanted, "snapshot": self.snapshot}
        asked = [name for name, value in asked.items() if value]
        if trainer.device.type == "cuda":
            self._set_up(trainer.device, trainer.undo)
        elif asked:
            log.info("memory: %s need(s) a GPU, and this run is on %s", ", ".join(asked), trainer.device.type)
        return build()

    def _set_up(self, device: torch.device, undo: ExitStack) -> None:
        torch.cuda.reset_peak_memory_stats(device)
        if self.wanted:
            undo.callback(allocator.write_settings, allocator.set_up(self.wanted, device))
        if self.max_share is not None:
            torch.cuda.memory.set_per_process_memory_fraction(self.max_share, device)
            undo.callback(torch.cuda.memory.set_per_process_memory_fraction, 1.0, device)
        if self.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
            undo.callback(torch.cuda.memory._record_memory_history, enabled=None)

    def on_fit_start(self, trainer) -> None:
        if trainer.device.type == "cuda":
            self.watch = allocator.Watch(trainer.device)
            name, peak = "perf/peak_memory_gib", partial(torch.cuda.max_memory_allocated, trainer.device)
        else:
            name, peak = "perf/peak_rss_gib", allocator.watch_resident(trainer.undo)
        trainer.gathered.append((lambda: peak() / allocator.GIB, partial(combine, name)))

    @only_logged
    def on_step_end(self, trainer) -> None:
        for text in self.watch.look() if self.watch else ():
            log.warning("step %d: %s", trainer.step, text)

    def on_fit_end(self, trainer) -> None:
        error = sys.exc_info()[1]  # the one that ends the run; its frames hold the tensors
        if self.snapshot and trainer.device.type == "cuda" and error and is_out_of_memory(error):
            try:
                torch.cuda.memory._dump_snapshot(str(snapshot_file(trainer)))
            except (OSError, RuntimeError) as failure:
                log.warning("%s: can't be written: %s", snapshot_file(trainer), failure)

    def on_error(self, trainer, error: Any) -> None:
        """Give the error advice, if memory has run out."""
        if not is_out_of_memory(error):
            return
        use = count(trainer, self.max_share)
        ways = advise(use, setting(trainer))
        if trainer.device.type == "cuda":
            ways = "; ".join(filter(None, [self._unused(trainer, use), ways]))
        error.advice = f"{use}; try {ways}"
        if self.snapshot and trainer.device.type == "cuda":
            error.advice += f"; snapshot for pytorch.org/memory_viz: {snapshot_file(trainer)}"

    def _unused(self, trainer: Context, use: Use) -> str:
        """Return what keeps memory of the GPU from tensors, other than tensors."""
        gib, device = allocator.GIB, trainer.device
        free, total = torch.cuda.mem_get_info(device)
        unused = allocator.unused_at_peak(torch.cuda.memory_stats(device))
        others = total - free - torch.cuda.memory_reserved(device)
        found = []
        if use.limit < total:
            found.append(f"callbacks.memory.max_share={self.max_share} ({(total - use.limit) / gib:.2f} GiB more)")
        if unused > allocator.UNUSED * use.peak and "expandable_segments" not in self.wanted:
            found.append(f"callbacks.memory.expandable_segments=true (up to {unused / gib:.2f} GiB, fragmented)")
        if others > allocator.UNUSED * total:
            found.append(f"a GPU of its own ({others / gib:.2f} GiB are other processes')")
        return ", ".join(found)


def combine(name: str, ranks: list[float]) -> dict[str, float]:
    """Return the largest of the ranks' peaks, and of several ranks the share by which the smallest is below it."""
    most = max(ranks)
    skew = {"perf/memory_skew": (most - min(ranks)) / most} if len(ranks) > 1 and most else {}
    return {name: most, **skew}


def snapshot_file(trainer: Context) -> Path:
    return trainer.run_dir / "logs" / f"memory-rank{trainer.rank}.pickle"


def count(trainer: Context, max_share: float | None) -> Use:
    """Count the bytes of this rank."""
    module, parameters = trainer.module, trainer.parameters
    gradients = size(parameters) + trainer.strategy.bucket_bytes
    owned = trainer.strategy.owned
    state, expected = count_state(trainer.optimizer, parameters if owned is None else owned)
    peak, limit = allocator.peak_resident(), 0
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        limit = int(torch.cuda.mem_get_info(trainer.device)[1] * (max_share or 1))
    weights = size([*module.parameters(), *module.buffers()])
    return Use(peak, weights, gradients, state, expected, limit)


def setting(trainer: Context) -> Setting:
    """Return the settings of the run that the advice depends on."""
    try:
        blocks = len(find_blocks(trainer.recipe, trainer.module, None, ""))
    except ConfigError:
        blocks = 0
    # With accumulation, gradients are kept until the last micro-batch, and DDP's buckets alone are saved.
    buckets = trainer.strategy.bucket_bytes
    freed = buckets + (size(trainer.parameters) if trainer.plan.accumulate == 1 else 0)
    return Setting(
        trainer.world,
        trainer.plan.micro,
        blocks,
        trainer.precision.name,
        trainer.device.type == "cuda",
        type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        freed,
        frozenset(usable(trainer)),
    )


def usable(trainer: Context) -> Iterator[str]:
    """Yield the callbacks that the run would take beside its own, and the names of all optimizers."""
    yield from (file.stem for file in (CONF / "optimizer").glob("*.yaml"))
    for name, settings in CANDIDATES:
        if name == "auto_batch" and trainer.plan.order is None:  # the data cuts the batches itself
            continue
        if accepts(trainer, name, **settings):
            yield ".".join([name, *map(str, settings.values())])
