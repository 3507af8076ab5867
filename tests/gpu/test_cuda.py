"""One CUDA device: the parts that no CPU has. `./scripts/test -m gpu`."""

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu import ACCELERATOR, on_device, only_gpu
from torch.utils.data import Dataset
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.comm.reduce import Background
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.batch import Micro
from trainer.data.device_prefetch import upload
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = on_device
STEPS = 6


def train(run: str, steps: int, resume: str | None = None, precision: Any = "fp32") -> Trainer:
    options = Options(
        max_steps=steps, run_dir=f"runs/{run}", resume=resume, precision=precision, accelerator=ACCELERATOR,
        log_every_steps=1, checkpoint=CheckpointOptions(every_steps=4), deterministic=True,
    )  # fmt: skip
    data = DataOptions(workers=2, shuffle_shards=5, shuffle_window=4)
    trainer = Trainer(
        Toy(dropout=0.1), {"ema": EMA(0.9)}, batch=12, accumulate=2, options=options, data=data, place=Place()
    )
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()])


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    straight = weights(train("straight", 10))
    train("halves", 4)
    assert torch.equal(straight, weights(train("halves", 10, resume="auto")))


@pytest.mark.parametrize("precision", ["auto", pytest.param("tf32", marks=only_gpu), "bf16", "fp16", "bf16_params"])
def test_every_precision_trains_near_fp32(precision, tmp_path):
    exact, other = train("exact", 10), train("other", 10, precision=precision)
    assert torch.allclose(weights(exact), weights(other), atol=2e-2)
    assert other.scaler.is_enabled() == (other.precision.name == "fp16")


@only_gpu
def test_batches_arrive_whole_and_in_order_while_the_device_computes():
    batches = [{"x": torch.full((1 << 20,), float(i)).pin_memory()} for i in range(8)]
    busy = torch.randn(2048, 2048, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    micros = upload(iter([Micro(b, 1, [], []) for b in batches]), torch.cuda.Stream(device))
    for i, micro in enumerate(micros):
        busy = busy @ busy * 1e-3
        assert micro.batch["x"].is_cuda
        assert bool((micro.batch["x"] == i).all())


@only_gpu
@pytest.mark.parametrize("kind", ["pageable", "pinned", "BatchEncoding"])
def test_a_batch_behind_a_sleeping_kernel_arrives_whole(kind):
    """The copies' stream sleeps: a batch that its step reads too early has the bytes of the one before."""
    make = pytest.importorskip("transformers").BatchEncoding if kind == "BatchEncoding" else dict
    device = torch.device("cuda", torch.cuda.current_device())
    stream, size = torch.cuda.Stream(device), 1 << 20

    def micros() -> Iterator[Micro]:
        for i in range(6):
            x = torch.full((size,), float(i))
            x = x if kind == "pageable" else x.pin_memory()
            yield Micro(make({"x": x}), 1, [], [])
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2**27)

    for i, micro in enumerate(upload(micros(), stream)):
        assert micro.batch["x"].is_cuda and bool((micro.batch["x"] == i).all())


@only_gpu
def test_loading_looks_one_batch_ahead_and_no_further():
    taken = itertools.count()
    source = (Micro({"x": torch.zeros(1) + next(taken)}, 1, [], []) for _ in itertools.count())
    device = torch.device("cuda", torch.cuda.current_device())
    ahead = upload(source, torch.cuda.Stream(device))
    next(ahead)
    assert next(taken) == 2


@only_gpu
def test_what_runs_beside_the_step_is_waited_for_and_keeps_its_memory():
    """`Background`'s stream: a slow call, a buffer that is freed at once, and its successor in the same memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    background, busy = Background(device), torch.randn(4096, 4096, device="cuda")

    def slow_double(flat: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            torch.mm(busy, busy)
        return flat * 2

    for value in range(20):
        flat = torch.full((1 << 20,), float(value), device="cuda")
        coming = background.submit(slow_double, flat.clone())
        torch.full((1 << 20,), -1.0, device="cuda")  # takes the memory of the clone, if nobody holds it
        assert bool((coming.wait() == 2.0 * value).all())


class Counted(Dataset):
    """Counts the samples that data workers have read."""

    def __init__(self) -> None:
        self.read = multiprocessing.get_context("fork").Value("q", 0)

    def __len__(self) -> int:
        return 960

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        with self.read.get_lock():
            self.read.value += 1
        return Points(960, torch.float32)[i]


class Slow(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.train_data = Counted()

    def data(self, split: str) -> Dataset | None:
        return self.train_data if split == "train" else None


class Ahead(Callback):
    """Waits, before a step ends, until workers have read all of the next: they do so beside the step, or never."""

    def __init__(self, read: Any) -> None:
        self.read, self.steps = read, 0

    def on_step_end(self, trainer) -> None:
        wanted, deadline = min(trainer.step + 1, STEPS) * trainer.batch, time.monotonic() + 20
        while self.read.value < wanted:
            assert time.monotonic() < deadline, (trainer.step, self.read.value)
            time.sleep(0.005)
        self.steps += 1


def test_a_step_of_many_micro_batches_is_loaded_beside_the_one_before(tmp_path):
    recipe = Slow()
    ahead = Ahead(recipe.train_data.read)
    options = Options(max_steps=STEPS, accelerator=ACCELERATOR, checkpoint=CheckpointOptions(every_steps=None))
    data = DataOptions(workers=2)
    Trainer(recipe, {"ahead": ahead}, batch=48, accumulate=8, options=options, data=data, place=Place()).fit()
    assert ahead.steps == STEPS
