"""Measures peak memory, limits the process's share of a GPU, and advises when memory runs out."""

import contextlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from trainer.annotated import AtLeast, AtMost, PositiveFloat
from trainer.callback import Callback, Role, Symptom, only_logged
from trainer.composition import in_words, kinds, remedies
from trainer.config.folders import CONF
from trainer.context import Context
from trainer.cost.machine import Link, Machine
from trainer.cost.memory import predict_memory
from trainer.cost.setup import Cost, Setup
from trainer.cost.workload import Workload
from trainer.errors import ConfigError, is_out_of_memory
from trainer.log import log
from trainer.monitors.candidates import accepts, made
from trainer.monitors.memory import allocator
from trainer.monitors.memory.advice import Setting, Use, advise, count_state, size
from trainer.parallel.blocks import find_blocks

EVENTS = 100_000  # allocations that a snapshot has; some hundred bytes of host memory each


class Memory(Callback):
    """Adds `perf/peak_memory_gib`: GiB of tensors on the GPU at the peak, of the rank with the most.

    On a CPU, `perf/peak_rss_gib` is the resident memory of the process (VmHWM), without data workers. With several
    ranks, `perf/memory_skew` is the share by which the smallest peak is below the largest.

    Args:
        max_share: Share of the GPU's memory that the process may use. Beyond it, torch raises OutOfMemoryError.
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
        """Configure the allocator before anything is on the device."""
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
        if not is_out_of_memory(error):
            return
        use = count(trainer, self.max_share)
        error.advice = str(use)
        try:
            ways = advise(use, setting(trainer, use))
        except Exception as failure:  # of a user's callback, which is asked what it goes with
            log.warning("memory: no advice about callbacks: %s: %s", type(failure).__name__, failure)
            ways = ""
        if trainer.device.type == "cuda":
            ways = "; ".join(filter(None, [self._unused(trainer, use), ways]))
        error.advice = f"{use}; try {ways}" if ways else str(use)
        if self.snapshot and trainer.device.type == "cuda":
            error.advice += f"; snapshot for pytorch.org/memory_viz: {snapshot_file(trainer)}"

    def _unused(self, trainer: Context, use: Use) -> str:
        """Return what other than tensors occupies memory of the GPU."""
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
    """Return the largest peak, and with several ranks the share by which the smallest is below it."""
    most = max(ranks)
    skew = {"perf/memory_skew": (most - min(ranks)) / most} if len(ranks) > 1 and most else {}
    return {name: most, **skew}


def snapshot_file(trainer: Context) -> Path:
    return trainer.run_dir / "logs" / f"memory-rank{trainer.rank}.pickle"


def count(trainer: Context, max_share: float | None) -> Use:
    module, parameters = trainer.module, trainer.parameters
    gradients = size(parameters) + trainer.strategy.bucket_bytes
    stepped = parameters if trainer.strategy.owned is None else trainer.strategy.owned
    state, expected = count_state(trainer.optimizer, stepped, trainer.new_optimizer)
    peak, limit = allocator.peak_resident(), 0
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        limit = int(torch.cuda.mem_get_info(trainer.device)[1] * (max_share or 1))
    weights = size([*module.parameters(), *module.buffers()])
    return Use(peak, weights, gradients, state, expected, limit)


def setting(trainer: Context, use: Use) -> Setting:
    found = [(name, knobs) for name, knobs in remedies(Symptom.MEMORY) if accepts(trainer, name, **knobs)]
    finds = [in_words(*each) for each in found if kinds()[each[0]].role == Role.BATCH]
    return Setting(
        trainer.plan.micro,
        trainer.precision.name,
        trainer.device.type == "cuda",
        type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
        {in_words(*each): saved_bytes(trainer, use, made(*each)) for each in found if in_words(*each) not in finds},
        finds if trainer.plan.order is not None else [],  # else the data cuts the batches itself
        [file.stem for file in (CONF / "optimizer").glob("*.yaml")],
    )


def saved_bytes(trainer: Context, use: Use, candidate: Callback) -> float:
    """Return the bytes that the cost model predicts a further callback to save, from the bytes of this rank."""
    sizes = tuple(max(1, size([p]) // 4) for p in trainer.parameters) or (1,)  # the model counts in float32
    state, activations = 8.0 * sum(sizes) + use.state, use.rest / trainer.plan.micro
    work = Workload(sizes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, activations, state)
    place, link = trainer.ranks.place, Link(0.0, 1.0, 0.0)
    ranks = trainer.strategy.data_world  # a pipeline's parameters here are those of one stage
    machine = Machine(ranks, min(ranks, place.local_world), 1.0, link, link, {}, None, 1.0)
    costs = {name: cost_of(callback) for name, callback in trainer.callbacks.items()}
    own = {name: cost for name, cost in costs.items() if cost.stages == 1}
    views = trainer.strategy.bucket_bytes == 0
    settings = {"micro_batch": trainer.plan.micro, "trainer.ddp.gradient_as_bucket_view": views}
    today, added = Setup(machine, work, trainer.batch, own, settings), cost_of(candidate)
    saved = predict_memory(today) - predict_memory(replace(today, costs={**own, "": added}))
    if added.keeps == 1:
        return saved
    try:
        blocks = len(find_blocks(trainer.recipe, trainer.module, None, ""))
    except ConfigError:
        blocks = 1
    return min(saved, use.rest * (1 - 1 / blocks))  # one block's activations are there at a time


def cost_of(callback: Callback) -> Cost:
    """Return a callback's cost; none if a user's callback fails to report it, because advice must not fail."""
    with contextlib.suppress(Exception):
        found = callback.cost()
        return found if isinstance(found, Cost) else Cost()
    return Cost()
