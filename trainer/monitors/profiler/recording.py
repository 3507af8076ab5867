"""One recording by torch.profiler: its start, its end, and its files."""

import gzip
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler import _ExperimentalConfig as Config

from trainer.callback import UNLOGGED, Callback, name_of
from trainer.comm import clock
from trainer.context import Context
from trainer.files import Appended
from trainer.monitors.memory.callback import EVENTS
from trainer.monitors.profiler.regions import Regions

ROWS = 30  # operators in the table
TOP = 3  # operators in the line of the log
LEVEL = 3  # of gzip: several times as fast as 9
QUIET = "6"  # a level of kineto's log above all of its lines; it prints one at each start and stop
NAMED = ("on_before_optimizer_step", "on_step_undone", "on_step_end", UNLOGGED, "on_flush", "on_validation_end")


class Recording:
    """A recording of `active` steps by torch.profiler. A running phase clock marks the regions of the trace."""

    def __init__(
        self, trainer: Context, first: int, active: int,
        record_shapes: bool, with_stack: bool, profile_memory: bool,
    ) -> None:  # fmt: skip
        self.trainer, self.first, self.active, self.last = trainer, first, active, first
        self.folder = trainer.run_dir / "profile" / f"rank{trainer.rank}"
        self.cuda, self.memory = trainer.device.type == "cuda", profile_memory
        self.profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])],
            record_shapes=record_shapes,
            with_stack=with_stack,
            profile_memory=profile_memory,
            # On a CPU a thread may reduce gradients. Of all threads, torch reports no memory.
            experimental_config=Config(profile_all_threads=not self.cuda and not profile_memory),
        )
        self.undo = ExitStack()

    def start(self, end: Callable[[], None]) -> None:
        """Start recording; an exception means that nothing is recorded. `end` is called as a validation begins."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.memory and self.cuda and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
            self.undo.callback(torch.cuda.memory._record_memory_history, enabled=None)
        before = os.environ.get("KINETO_LOG_LEVEL")
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)  # read once in a process
        try:
            self.profile.start()
        finally:
            if before is None:
                del os.environ["KINETO_LOG_LEVEL"]
        self.regions = Regions(self._begin_step, end)
        running = clock.start(self.trainer.device, self.undo)
        self.undo.callback(clock.stop, running)
        running.listener = self.regions
        self.undo.callback(setattr, running, "listener", None)
        for hook in NAMED:
            self._name(hook)

    def stop(self) -> None:
        with self.undo:  # also if a line raises
            self.regions.end()
            self.profile.stop()
            if self.memory and self.cuda:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{self.first}.pickle"))

    def write(self) -> str:
        """Write the trace and the table of operators; return a line about both.

        Raises:
            OSError: The disk is full. No partial trace is left.
        """
        path, plain = self.folder / f"step-{self.first}.json.gz", self.folder / f".step-{self.first}.json"
        packed = plain.with_suffix(".json.gz")
        try:
            self.profile.export_chrome_trace(str(plain))
            if not plain.exists() or not ends_whole(plain):  # kineto raises nothing
                raise OSError("kineto could not write the whole trace; make room on the disk")
            with plain.open("rb") as source, gzip.open(packed, "wb", LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(path)
        finally:
            for file in (plain, packed, plain.with_suffix(".json.tmp")):  # the last is kineto's
                file.unlink(missing_ok=True)
        return f"steps {self.first} to {self.last} are in {path}; {self._summarize()}"

    def _summarize(self) -> str:
        """Append the table of operators to summary.txt; return the operators with the most own time."""
        averages = self.profile.key_averages()
        key = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        file = Appended(self.folder / "summary.txt")
        title = f"Steps {self.first} to {self.last}, step-{self.first}.json.gz"
        file.write(f"{title}\n{averages.table(sort_by=key, row_limit=ROWS)}\n\n".encode())
        file.close()
        own = {event.key: getattr(event, key) for event in averages if not event.is_user_annotation}
        total = sum(own.values()) or 1
        top = sorted(own, key=lambda name: -own[name])[:TOP]
        return f"most time: {', '.join(f'{name} {own[name] / total:.0%}' for name in top)}"

    def _begin_step(self) -> str:
        """Return the name that torch's tools look for; empty after the last step."""
        step = self.trainer.step + 1
        if step >= self.first + self.active:
            return ""
        self.last = step
        return f"ProfilerStep#{step}"

    def _name(self, hook: str) -> None:
        before = self.trainer.hooks[hook]
        shown = hook.partition(",")[0]
        named = [self.regions.around(f"{self._owner(call)}.{shown}", call) for call in before]
        self.trainer.hooks[hook] = named
        self.undo.callback(self.trainer.hooks.__setitem__, hook, before)

    def _owner(self, call: Any) -> str:
        """Return the callback's name in the config; for the trainer's own functions, the module's name."""
        owner = getattr(call, "__self__", None)
        if isinstance(owner, Callback):
            return name_of(owner, self.trainer.callbacks)
        return getattr(call, "__module__", "").rpartition(".")[2]


def ends_whole(path: Path) -> bool:
    """Return whether the file ends like a JSON object."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")
