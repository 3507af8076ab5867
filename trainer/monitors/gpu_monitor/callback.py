"""Adds numbers about the GPU and the host to the metrics."""

from collections.abc import Iterator

import torch

from trainer.annotated import PositiveFloat
from trainer.callback import Callback, Role, only_logged
from trainer.comm.affinity import pci_address
from trainer.log import log
from trainer.monitors.gpu_monitor.host import watch_host
from trainer.monitors.gpu_monitor.nvml import SLOWDOWNS, watch_gpu
from trainer.monitors.gpu_monitor.sampler import LARGEST_RANK, Sampler, combine


class GpuMonitor(Callback):
    """Adds `gpu/...`, from NVML, and `host/...`, from /proc, /sys and control groups. The card lists them.

    Numbers are means over the samples since the last logged step, and over ranks. Memory, temperature and the spread of
    utilisation are maxima; PCIe's numbers are those of the rank with the largest. A node's first rank measures the
    host. A warning names each reason for throttled clocks once, with the ranks.

    Args:
        every_s: Seconds between two samples.
    """

    role = Role.MEASURE

    def __init__(self, every_s: PositiveFloat = 1.0) -> None:
        self.every_s = every_s
        self.sampler: Sampler | None = None
        self.slow = self.reported = 0  # bits of `SLOWDOWNS`: since the last logged step; in a warning already

    def on_fit_start(self, trainer) -> None:
        sources = list[Iterator[dict[str, float]]]()
        if trainer.device.type != "cuda":
            log.info("gpu_monitor: the run is on %s: host/... alone is measured", trainer.device.type)
        elif torch.version.hip:
            log.warning("gpu_monitor: NVML knows no GPUs of AMD: host/... alone is measured")
        else:
            uuid = str(torch.cuda.get_device_properties(trainer.device).uuid)
            sources.append(watch_gpu(uuid, pci_address(trainer.device), self._note))
        if trainer.ranks.place.local_rank == 0:
            sources.append(watch_host())
        self.sampler = Sampler(sources, self.every_s)
        try:
            self.sampler.start()
        except RuntimeError as error:  # at the limit of processes
            log.warning("gpu_monitor: measures nothing: %s; see the limit of processes, `ulimit -u`", error)

    @only_logged
    def on_step_end(self, trainer) -> None:
        if self.sampler is None:
            return
        slow, self.slow = self.slow, 0
        rows = trainer.ranks.gather([self.sampler.take(), slow])
        for name in dict.fromkeys(name for numbers, _ in rows for name in numbers):
            values = [numbers[name] for numbers, _ in rows if name in numbers]
            trainer.metrics[name] = combine(name, values, LARGEST_RANK)
        name = "gpu/utilisation"
        if used := [(numbers[name], rank) for rank, (numbers, _) in enumerate(rows) if name in numbers]:
            trainer.metrics["gpu/utilisation_min"], trainer.metrics["gpu/idlest_rank"] = min(used)
        for bit, reason in SLOWDOWNS.items():
            if not self.reported & bit and (ranks := [str(rank) for rank, (_, bits) in enumerate(rows) if bits & bit]):
                self.reported |= bit
                text = "step %d: clocks of the GPU throttled by %s: rank %s"
                log.warning(text, trainer.step, reason, ", ".join(ranks))

    def on_fit_end(self, trainer) -> None:
        if self.sampler is not None:
            self.sampler.close()

    def _note(self, bits: int) -> None:
        self.slow |= bits
