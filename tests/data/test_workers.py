"""Data workers that hang, or that the system gives too little: one line, or another start, and nobody waits."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import torch
from support.cli import MAIN, TOY, run
from support.loaders import small_loader, steps, whole
from support.messages import refuses
from support.quick import quick
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from toy_recipe import Points, Toy

from trainer.data import workers
from trainer.data.remote.prefetch import fetching
from trainer.data.remote.shard import Remote
from trainer.errors import ConfigError, UnavailableError

# A user who may do all with files: the limit does not hold for root.
CAPABLE = [
    "setpriv",
    "--reuid=54322",
    "--clear-groups",
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=+dac_override",
]
WORDS = [*TOY, "~callbacks.tensorboard", "trainer.max_steps=6", "trainer.validate_every=null", "data.workers=2"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prlimit"), reason="util-linux's prlimit is missing")
def test_too_few_files_are_named_before_a_batch_is_lost(tmp_path):
    result = run(WORDS, tmp_path, ["prlimit", "--nofile=32:32", *MAIN])
    assert result.code == 78
    said = (
        "echelon: data.workers: ulimit -n=32: too few files may be open; raise this limit, or give fewer data.workers"
    )
    assert result.err.startswith(said) and result.err.count("\n") == 1


def test_a_worker_without_a_thread_is_named_before_a_batch_is_lost(monkeypatch):
    """Which thread is the one too many is a matter of time: the rank would wait for the batch, or find a traceback."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "DupFd", fail)
    loader = partial(DataLoader, [1, 2, 3], batch_size=None, num_workers=1)
    with refuses("data.workers", "processes", "data.workers"):
        workers.start_workers(loader, iter([0, 1, 2]))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to run as another user")
@pytest.mark.slow
@pytest.mark.parametrize(("most", "sure"), [(6, True), (10, False)])
def test_too_few_processes_end_the_run_soon(tmp_path, most, sure):
    """A worker can't be forked, or has no thread for its tensors. If one has none to send a batch, torch tells it."""
    began = time.monotonic()
    result = run(WORDS, tmp_path, [*CAPABLE, "prlimit", f"--nproc={most}", *MAIN], HOME=str(tmp_path))
    assert time.monotonic() - began < 50
    assert result.code in (1, 78)
    limit = f"ulimit -u={most}, or pids.max of the control group"
    named = f"{limit}: too few processes and threads may run; raise this limit, or give fewer" in result.err
    one_line = named and result.err.count("\n") == 1
    assert one_line or (not sure and "can't start new thread" in result.err), result.err


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """torch waits 5 s at the end for each worker that hangs, or that a traceback still holds."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


class Hangs(Points):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        time.sleep(30)
        return super().__getitem__(i)


class HangingRecipe(Toy):
    def data(self, split: str) -> Dataset:
        return Hangs(12, torch.float32)


def test_a_data_worker_that_hangs_is_one_line():
    loader = small_loader(HangingRecipe(), 0, 1, timeout_s=0.5, workers=1)
    started = time.monotonic()
    message = ""
    try:
        next(loader.train(0))
    except UnavailableError as error:
        assert time.monotonic() - started < 20
        message = str(error)
    assert message.startswith("trainer.timeout_s=0.5: a data worker gave no batch in this time; ")
    assert "\n" not in message


hangs_at_fork: list[bool] = []
os.register_at_fork(after_in_child=lambda: time.sleep(600) if hangs_at_fork else None)


def test_workers_that_hang_as_they_are_forked_are_started_again(monkeypatch):
    expected = [step.batches[0]["x"] for step in steps(small_loader(Toy(), 0, 1, workers=2), 0, 3)]
    monkeypatch.setattr("trainer.timeouts.FORK_S", 0.5)
    monkeypatch.setattr("trainer.data.workers.log.warning", lambda *_: hangs_at_fork.clear())
    hangs_at_fork.append(True)
    before, handler = multiprocessing.active_children(), signal.signal(signal.SIGTERM, lambda *_: None)  # as a run has
    loader = small_loader(Toy(), 0, 1, workers=2)
    found = [whole(step).batches[0]["x"] for step in itertools.islice(loader.train(0), 3)]
    assert all(map(torch.equal, expected, found)) and not hangs_at_fork
    loader.close()
    signal.signal(signal.SIGTERM, handler)
    deadline = time.monotonic() + 5
    while set(multiprocessing.active_children()) - set(before):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start_method():
    """Is set back."""
    yield multiprocessing.set_start_method
    multiprocessing.set_start_method(None, force=True)


def test_workers_are_forked_whatever_the_process_has_set(start_method):
    start_method("spawn", force=True)
    assert len(steps(small_loader(Toy(), 0, 1, workers=1), 0, 2)) == 2
    with fetching({0: Remote.kept("http://none/a.tar", "cache", 1.0)}, lambda: iter([]), 1, 1) as passed:
        passed()


def test_workers_start_where_more_files_are_open_than_select_takes():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert len(steps(small_loader(Toy(), 0, 1, workers=1), 0, 2)) == 2


class Lambda(Toy):
    def weight(self, batch):
        return 1

    def collate(self, samples):
        return {"x": torch.zeros(len(samples)), "more": lambda: samples}


class Graph(Lambda):
    def collate(self, samples):
        return {"x": torch.zeros(len(samples), requires_grad=True) * 2}


@pytest.mark.parametrize(
    ("recipe", "why"), quick([(Lambda(), "lambda"), (Graph(), "a tensor has a graph: detach() it")])
)
def test_a_batch_that_no_worker_can_send_is_named_at_the_first(recipe, why):
    """Else torch's queue drops the batch, and the rank waits for it until `trainer.timeout_s`."""
    loader = small_loader(recipe, 0, 1, workers=1)
    try:
        with pytest.raises(ConfigError, match=rf"^data\.workers: a worker can't send the batch \(.*{re.escape(why)}"):
            next(loader.train(0))
    finally:
        loader.close()
    assert whole(next(small_loader(recipe, 0, 1, workers=0).train(0))).batches


def test_a_batch_of_a_users_own_class_is_sent():
    class Own(Toy):
        def collate(self, samples):
            return {"x": torch.zeros(len(samples)), "array": np.zeros(3), "own": UserDict(a=1), "leaf": leaf}

        def weight(self, batch):
            return 1

    leaf = torch.zeros(2, requires_grad=True)
    loader = small_loader(Own(), 0, 1, workers=1)
    try:
        assert whole(next(loader.train(0))).batches[0]["own"] == {"a": 1}
    finally:
        loader.close()


def with_shm(size, words, tmp_path):
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "x"]
    words = [*TOY, "~callbacks.tensorboard", "data.workers=2", "trainer.max_steps=9", "trainer.restarts=0", *words]
    return run(words, tmp_path, [*mount, *MAIN])


@pytest.mark.skipif(bool(os.getuid()), reason="needs root, for a /dev/shm of its own")
def test_a_shared_memory_without_room_for_a_semaphore_is_no_bad_sample(tmp_path):
    done = with_shm("4k", [], tmp_path)
    line = "echelon: /dev/shm: has no room for the locks or batches of data workers; make room, enlarge it"
    assert done.code == 69 and done.err.startswith(line) and done.err.count("\n") == 1, done.err


@pytest.mark.slow
@pytest.mark.skipif(bool(os.getuid()), reason="needs root, for a /dev/shm of its own")
def test_batches_need_no_room_in_a_containers_shared_memory(tmp_path):
    """Docker gives 64 MB, which the first batches of images would fill. Here six of 128 KiB are loaded ahead."""
    done = with_shm("256k", ["batch=2048", "recipe.samples=8192"], tmp_path)
    assert done.code == 0, done.err
