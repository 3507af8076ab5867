"""Advises on the speed of a run: each finding once, with its number, its limit and the setting that fixes it."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.callback import Callback, Role, only_logged
from trainer.comm.affinity import pci_address
from trainer.context import Context
from trainer.data.batch import Step
from trainer.files import Appended, finite
from trainer.log import log
from trainer.monitors.advice import kernels
from trainer.monitors.advice.rules import ALL, MOST_MEMORY, Finding, Run, find
from trainer.monitors.candidates import accepts
from trainer.monitors.memory.callback import count
from trainer.parallel.forward_backward import ForwardBackward
from trainer.process import cgroup

MOST = 5  # findings that the end of the run repeats
PCI = Path("/sys/bus/pci/devices")
# Share of a PCIe lane's gigatransfers/s that is payload: 8b/10b up to 5, then 128b/130b; PAM4 from 64 on.
CODED = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}
MEASURED = ("time/", "gpu/", "perf/", "advice/")  # numbers that a warm-up changes


class Advice(Callback):
    """Judges the numbers of logged steps on rank 0, and reports each finding of `rules` once per run.

    A finding must hold for two logged steps in a row. The first logged step, and steps in which torch.compile has
    compiled, are not judged by times. `advice.jsonl` has the findings, and a resume does not repeat them. Numbers come
    from other callbacks; a rule whose numbers are missing is silent.
    """

    def __init__(self) -> None:
        self.file: Appended | None = None
        self.said: dict[str, dict[str, Any]] = {}  # name -> line of the file
        self.before: dict[str, Finding] = {}  # of the logged step before
        self.kernels = Counter[str]()
        self.stalled, self.total, self.stalls = 0.0, 0.0, 0  # seconds of checkpoints, of steps; intervals with any
        self.graphs: float | None = -1.0  # of torch.compile at the logged step before; at first that of no step

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        if trainer.rank == 0:
            kernels.watch_warnings(self.kernels, trainer.undo)
        return model

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        """Watch attention in the first pass, on a GPU. A compiled model would be recompiled for the watch."""
        compiles = any(callback.role == Role.COMPILE for callback in trainer.callbacks.values())
        if trainer.rank or trainer.device.type != "cuda" or compiles:
            return run
        watched = False

        def passes(data: Step, total: Callable[[], int]) -> list[Tensor]:
            nonlocal watched
            if watched:
                return run(data, total)
            watched = True
            with kernels.watch_attention(self.kernels):
                return run(data, total)

        return passes

    def on_fit_start(self, trainer) -> None:
        if trainer.rank:
            return
        path = trainer.run_dir / "advice.jsonl"
        self.said, self.file = read(path), Appended(path)
        self.run, self.step = facts(trainer), trainer.step
        self.lasting = kernels.look(trainer.optimizer, trainer.device, trainer.precision.name)

    @only_logged
    def on_step_end(self, trainer) -> None:
        if self.file:
            self._judge(trainer)

    def _judge(self, trainer: Context) -> None:
        numbers, graphs = trainer.metrics, trainer.metrics.get("compile/graphs")
        steps, self.step = trainer.step - self.step, trainer.step
        if graphs != self.graphs:  # also at the first logged step
            numbers = {name: value for name, value in numbers.items() if not name.startswith(MEASURED)}
        else:
            numbers = numbers | self._stall(numbers, steps)
        self.graphs = graphs
        own = {f"kernel/{name}": float(times) for name, times in self.kernels.items()}
        own["kernel/graph_breaks"] = 0.0 if graphs is None else kernels.graph_breaks()
        own["kernel/no_unused_parameters"] = kernels.searches_for_nothing(trainer.strategy.model)
        found = {finding.name: finding for finding in find({**numbers, **self.lasting, **own}, self.run)}
        for name, finding in found.items():
            before = self.before.get(name)
            if name not in self.said and before and before.subject == finding.subject:
                self._say(finding, trainer.step)
        self.before = found

    def _stall(self, numbers: dict[str, float], steps: int) -> dict[str, float]:
        """Return the share of time that checkpoints took, once two logged steps have had some."""
        stall = numbers.get("time/checkpoint", 0.0) * steps
        self.stalled, self.total = self.stalled + stall, self.total + numbers.get("time/step", 0.0) * steps
        self.stalls += stall > 0
        return {"advice/checkpoint": self.stalled / self.total} if self.stalls > 1 and self.total else {}

    def _say(self, finding: Finding, step: int) -> None:
        assert self.file
        line = {key: getattr(finding, key) for key in ("name", "value", "limit", "text", "config")}
        line["rank"] = None if finding.subject == ALL else finding.subject
        self.said[finding.name] = line
        self.file.write(f"{json.dumps(finite({'step': step, **line}))}\n".encode())
        log.info("advice: %s; try %s", finding.text, finding.config)

    def on_fit_end(self, trainer) -> None:
        if self.file is None:
            return
        self.file.close()
        if sys.exc_info()[1] is None:  # else the error is the last word
            followed = f"data.workers={self.run.workers}"  # a resume has it already
            lines = [line for line in self.said.values() if line["config"] != followed]
            for line in lines[:MOST]:
                log.info("advice      %s; try %s", line["text"], line["config"])
            if len(lines) > MOST:
                log.info("advice      %d more in %s", len(lines) - MOST, self.file.path)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the findings in a file by name, skipping damaged lines."""
    found: dict[str, dict[str, Any]] = {}
    try:
        content = path.read_text(errors="replace")
    except OSError:  # there is none yet; if it can't be written either, the log says so
        return found
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a killed run may be a part
            continue
        if isinstance(line, dict) and all(isinstance(line.get(key), str) for key in ("name", "text", "config")):
            found[line["name"]] = line
    return found


def facts(trainer: Context) -> Run:
    plan, data, saves, place = trainer.plan, trainer.plan.data, trainer.options.checkpoint, trainer.ranks.place
    cuda = trainer.device.type == "cuda"
    moves = (name for name, callback in trainer.callbacks.items() if getattr(callback, "policy", "") == "offload")
    return Run(
        world=trainer.world,
        nodes=max(1, trainer.world // max(1, place.local_world)),
        data_world=trainer.strategy.data_world,
        cuda=cuda,
        precision=trainer.precision.name,
        batch=trainer.batch,
        micro=plan.micro,
        accumulate=plan.accumulate,
        splits=any(callback.role == Role.BATCH for callback in trainer.callbacks.values()),
        workers=data.workers,
        prefetch=data.prefetch,
        gradient_mib=sum(p.numel() * p.element_size() for p in trainer.parameters) / 2**20,
        cores=cores_of(place.local_world),
        fixed_interval=saves.every is None and bool(saves.every_steps or saves.every_minutes),
        profiles="profiler" in trainer.callbacks,
        offloads=next(moves, ""),
        skips=saves.when_busy == "skip",
        pcie_mib_s=link_speed(PCI / pci_address(trainer.device)) if cuda else 0.0,
        fits=partial(fits, trainer),
        accepts=partial(accepts, trainer),
    )


def cores_of(ranks: int) -> int:
    """Return the cores per rank of a node, by CPU mask, node and container limit."""
    most = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) / ranks, cgroup.cores_each(ranks))
    return max(1, int(most))


def fits(trainer: Context) -> int:
    """Return the largest micro-batch that the GPU's memory would hold, in samples on this rank; 0: unknown.

    Everything but weights, gradients and optimizer state is taken to grow with the samples, so more may fit.
    """
    use = count(trainer, None)
    if not use.limit or not use.rest:
        return 0
    return int(trainer.plan.micro * (MOST_MEMORY * use.limit - (use.peak - use.rest)) / use.rest)


def link_speed(device: Path) -> float:
    """Return a PCIe link's payload rate in MiB/s, each way; 0 if unknown.

    An idle GPU slows its link down, so the maximum speed counts; the width is that of the slot.
    """
    try:
        rate = re.match(r"[\d.]+", (device / "max_link_speed").read_text())
        lanes = int((device / "current_link_width").read_text())
    except (OSError, ValueError):
        return 0.0
    transfers = float(rate[0]) if rate else 0.0
    return transfers * CODED.get(transfers, 0.0) * 1e9 / 8 * lanes / (1 << 20)
