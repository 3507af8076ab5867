"""Takes samples in a separate thread, so that no step waits for them."""

import threading
from collections.abc import Iterable, Iterator

from trainer import timeouts
from trainer.log import log

LARGEST = frozenset({"gpu/memory_gib", "gpu/temperature_c", "gpu/utilisation_spread"})  # of samples and of ranks
LARGEST_RANK = LARGEST | {"gpu/pcie_rx_mib_s", "gpu/pcie_tx_mib_s"}  # each rank has a link of its own


class Sampler:
    """A thread that reads every source periodically, until `close`.

    Args:
        sources: Iterators of samples, numbers by name. One that ends or raises is dropped; the others continue.
        every_s: Pause between two samples of all sources.
    """

    def __init__(self, sources: Iterable[Iterator[dict[str, float]]], every_s: float) -> None:
        self.sources, self.every_s = list(sources), every_s
        self.samples = list[dict[str, float]]()  # since the last look
        self.newest = dict[str, float]()
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu_monitor", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread, unless a device never answers it."""
        self.ended.set()
        if self.thread.ident:  # it was started
            self.thread.join(timeouts.MONITOR_S)

    def take(self) -> dict[str, float]:
        """Return the combined samples since the last call; without any, the newest ones."""
        with self.lock:
            samples, self.samples = self.samples or [self.newest], []
        found = dict[str, float]()
        for name in dict.fromkeys(name for sample in samples for name in sample):
            values = [sample[name] for sample in samples if name in sample]
            found[name] = combine(name, values)
            if name == "gpu/utilisation":
                found["gpu/utilisation_spread"] = max(values) - min(values)
        return found

    def _run(self) -> None:
        try:
            while not self.ended.is_set():
                sample = dict[str, float]()
                for source in list(self.sources):
                    sample |= self._ask(source)
                with self.lock:
                    self.samples.append(sample)
                    self.newest = self.newest | sample
                self.ended.wait(self.every_s)
        finally:
            for source in self.sources:
                getattr(source, "close", lambda: None)()  # of a generator

    def _ask(self, source: Iterator[dict[str, float]]) -> dict[str, float]:
        try:
            return next(source)
        except StopIteration:
            self.sources.remove(source)  # it has reported why
        except Exception as error:
            self.sources.remove(source)
            log.warning("gpu_monitor: a source of numbers failed, and training continues: %r", error)
        return {}


def combine(name: str, values: Iterable[float], largest: frozenset[str] = LARGEST) -> float:
    values = list(values)
    return max(values) if name in largest else sum(values) / len(values)
