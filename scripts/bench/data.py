"""Measures how fast samples come out of tar shards, compared with WebDataset, torchdata and MosaicML's streaming.

    python -m scripts.bench.data [--quick] [--rounds 5] [--loaders NAME,...] [--json FILE]

A turn is one epoch of the same samples, in a process of its own. Every loader has a turn in each round. Samples count
from the second batch on, so a loader's start is not measured. A loader that is not installed has no row.

Large samples are 128 KiB of random bytes, like images that a loader does not decode. Small ones are 1024 tokens of 2
bytes, as npy. CPU time is that of the rank and its workers. "Cold" means that the kernel was asked to drop the files
from its page cache before the turn. The shards, about 1 GB, are written to a temporary folder in the current folder, so
they measure its disk. The last goal is the time of a resume in ten million samples. The bench takes about 10 minutes.
"""

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.harness import Goal, Report, Rounds, Row, Turn, alone, at_least, installed, parser
from scripts.command import command
from trainer.config.options import DataOptions
from trainer.data.batch import Split
from trainer.data.loader import Loader
from trainer.data.opening import open_source
from trainer.data.shards.index import Index
from trainer.data.shards.index_file import store
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import ConfigError, nearest

LARGE, TOKENS, SHARDS = 128 << 10, 1024, 16
MILLIONS = 10_000_000


@dataclass(frozen=True)
class Data:
    """Samples of one kind, as tar shards and, if MosaicML's streaming is installed, as MDS."""

    kind: str
    folder: Path
    samples: int
    batch: int

    @property
    def shards(self) -> list[str]:
        return sorted(map(str, (self.folder / "tar").glob("*.tar")))

    @property
    def member(self) -> str:
        return "bin" if self.kind == "large" else "npy"

    def write(self) -> None:
        random = np.random.default_rng(0)

        def sample(i: int) -> dict[str, Any]:
            large = self.kind == "large"
            value = random.bytes(LARGE) if large else random.integers(0, 30000, TOKENS, np.uint16)
            return {"__key__": f"{i:08d}", self.member: value}

        write_shards(map(sample, range(self.samples)), self.folder / "tar", "train", -(-self.samples // SHARDS))
        if "streaming" in LOADERS:
            from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

            column = {"x": "bytes" if self.kind == "large" else "ndarray"}
            with MDSWriter(out=str(self.folder / "mds"), columns=column) as writer:
                for i in range(self.samples):
                    writer.write({"x": sample(i)[self.member]})

    def cache(self, cold: bool) -> None:
        """Read the files into the kernel's page cache; `cold`: ask it to drop them."""
        for path in filter(Path.is_file, self.folder.rglob("*")):
            with path.open("rb") as file:
                if not cold:
                    file.read()
                else:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Recipe:
    def __init__(self, data: Data) -> None:
        self.given = data

    def data(self, split: str) -> Any:
        return self.given.shards if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: Any) -> Any:
        return sample[self.given.member]


def collate(values: list[Any]) -> Any:
    """Collate a batch, for every loader: bytes stay a list, arrays become one tensor."""
    return values if isinstance(values[0], bytes) else torch.from_numpy(np.stack(values).astype(np.int64))


def raw(data: Data, workers: int) -> Iterator[int]:
    """Read the shards in sequence, 1 MiB at a time, and yield the number of samples that the bytes are."""
    sizes = [os.path.getsize(shard) for shard in data.shards]
    for shard in data.shards:
        with open(shard, "rb", buffering=0) as file:
            while part := file.read(1 << 20):
                yield len(part) * data.samples / sum(sizes)  # pyright: ignore[reportReturnType]


def loader(data: Data, workers: int) -> Loader:
    options = DataOptions(workers=workers)
    recipe: Any = Recipe(data)
    source = open_source(recipe, "train", 0, options)
    assert isinstance(source, Samples)
    order = source.order(options.shuffle_shards, options.shuffle_window)
    return Loader(source, order, Split(data.batch), options, collate=collate, weight=len)


def echelon(data: Data, workers: int) -> Iterator[int]:
    return (sum(step.weights) for step in loader(data, workers).train(0))


def pipeline(data: Data) -> Any:
    from webdataset.compat import WebDataset

    shards = WebDataset(data.shards, shardshuffle=len(data.shards), seed=0, empty_check=False)
    samples = shards.shuffle(1000).decode().to_tuple(data.member)
    return samples.map(lambda values: values[0]).batched(data.batch, collation_fn=collate)


def web_dataset(data: Data, workers: int) -> Iterator[int]:
    from webdataset.compat import WebLoader

    return map(len, WebLoader(pipeline(data), batch_size=None, num_workers=workers))


def torchdata(data: Data, workers: int) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingImports]

    return map(len, StatefulDataLoader(pipeline(data), batch_size=None, num_workers=workers))


def streaming(data: Data, workers: int) -> Iterator[int]:
    from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]

    dataset = StreamingDataset(local=str(data.folder / "mds"), shuffle=True, batch_size=data.batch)
    return map(len, torch.utils.data.DataLoader(
        dataset, data.batch, num_workers=workers, collate_fn=lambda values: collate([value["x"] for value in values])
    ))  # fmt: skip


LOADERS: dict[str, Callable[[Data, int], Iterator[int]]] = {
    "raw": raw,
    "Echelon": echelon,
    "webdataset": web_dataset,
    **({"torchdata": torchdata} if installed("torchdata") else {}),
    **({"streaming": streaming} if installed("mosaicml-streaming") else {}),
}


def turn(data: Data, workers: int, cold: bool, name: str) -> Turn:
    data.cache(cold)
    return alone(count, name, data, workers)


def count(name: str, data: Data, workers: int) -> Turn:
    torch.set_num_threads(1)
    batches = LOADERS[name](data, workers)
    first = next(batches)
    began, cpu, seen = time.perf_counter(), cpu_s(), 0
    for samples in batches:
        seen += samples
        if seen + first >= data.samples - data.batch * max(1, workers):  # the last batches of workers are uneven
            break
    seconds = time.perf_counter() - began
    return {"rate": seen / seconds, "cpu_us": (cpu_s() - cpu) / seen * 1e6}


def cpu_s() -> float:
    """Return the CPU seconds of this process and its data workers."""
    files = [Path(f"/proc/{worker.pid}/stat") for worker in multiprocessing.active_children()]
    ticks = sum(int(ticks) for file in files for ticks in file.read_text().rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def many(folder: Path) -> Data:
    """Write ten shards whose indexes have ten million samples. All samples of a shard are the same bytes."""
    data = Data("small", folder, 10, 256)
    data.write()
    index = Index.open([Path(shard) for shard in data.shards])
    for number, shard in enumerate(index.shards):
        rows = np.repeat(index.samples(number)[:], MILLIONS // 10, axis=0)
        store(shard._replace(samples=len(rows)), rows)
    return data


def resume_s(data: Data, start: int) -> float:
    """Time the first batch at sample `start`: the index is read and checked, and a data worker started."""
    began = time.perf_counter()
    loading = loader(data, 1)
    next(loading.train(start))
    seconds = time.perf_counter() - began
    loading.close()
    return seconds


def table(data: Data, workers: int, cold: bool, found: Rounds) -> tuple[list[Row], list[Goal]]:
    def ratio(name: str, base: str) -> float:
        return found.ratio(name, base, "rate")

    part = f"{data.kind} samples, {'cold' if cold else 'warm'}, {workers} worker(s); {len(found.turns['raw'])} rounds"
    rows = found.table(part, "loader", {
        "samples/s": lambda name: found.median(name, "rate"),
        "of Echelon": lambda name: ratio(name, "Echelon"),
        "CPU us a sample": lambda name: found.median(name, "cpu_us"),
        "of raw reading": lambda name: ratio(name, "raw"),
        "max / min": lambda name: max(found.values(name, "rate")) / min(found.values(name, "rate")),
    })  # fmt: skip
    peers = [name for name in found.turns if name not in ("raw", "Echelon")]
    least = {"webdataset": 3}
    return rows, [at_least(f"{part}: times {name}", least.get(name, 1), ratio("Echelon", name)) for name in peers]


def resume_goal(data: Data) -> Goal:
    more_s = statistics.median(resume_s(data, MILLIONS - data.batch) - resume_s(data, 0) for _ in range(5))
    name = f"resume at the last batch of {MILLIONS:,} samples, seconds more than at 0"
    return Goal(name, "under 0.5", more_s, more_s < 0.5)


def main() -> None:
    quick = "an eighth of the samples, 1 round: about half a minute"
    made = parser("data", __doc__, quick, "without it 5, or 1 if --quick")
    made.add_argument("--loaders", help=f"separated by commas, of {', '.join(LOADERS)}; without it all")
    args = made.parse_args()
    rounds, scale = args.rounds or (1 if args.quick else 5), 8 if args.quick else 1
    names = list(dict.fromkeys(["raw", "Echelon", *(args.loaders.split(",") if args.loaders else LOADERS)]))
    for name in names:
        if name not in LOADERS:
            raise ConfigError(f"--loaders {name}: no such loader is installed; {nearest(name, list(LOADERS))}")
    packages = ("torch", "numpy", "webdataset", "torchdata", "mosaicml-streaming")
    with Report(args.json, packages) as report, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for kind, samples, batch in (("large", 4096 // scale, 32), ("small", 100_000 // scale, 256)):
            data = Data(kind, Path(folder) / kind, samples, batch)
            data.write()
            next(echelon(data, 0))  # makes the index
            for cold, workers in itertools.product((True, False), (1, 2)):
                take = partial(turn, data, workers, cold)
                found = Rounds.of(names).run(rounds, take, f"{kind} {'cold' if cold else 'warm'} {workers}, ")
                report.add(*table(data, workers, cold, found))
        report.goals.append(resume_goal(many(Path(folder) / "many")))


if __name__ == "__main__":
    command(main)
