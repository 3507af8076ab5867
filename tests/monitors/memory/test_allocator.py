"""Settings that torch itself parses, and warnings from counters that the test turns."""

import mmap
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch

from trainer.errors import ConfigError
from trainer.monitors.memory import allocator
from trainer.monitors.memory.allocator import GIB, Watch, merge_settings, peak_resident, set_up, watch_resident
from trainer.parallel.memory_search import drop_gradients

DEVICE = torch.device("cuda", 0)
WANTED = {"expandable_segments": "True", "max_split_size_mb": "64"}


class Cuda:
    """torch.cuda's functions about memory, of a GPU of 80 GiB."""

    def __init__(self, reserved: int = 0, cached: int = 0) -> None:
        self.reserved, self.cached, self.emptied = reserved, cached, 0
        self.stats = dict.fromkeys(("num_alloc_retries", "num_device_free"), 0)
        self.stats |= {"reserved_bytes.all.peak": 0, "allocated_bytes.all.peak": 0}

    def empty_cache(self) -> None:
        self.cached, self.emptied = 0, self.emptied + 1

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved + self.cached

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return dict(self.stats)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=80 * GIB)


@pytest.fixture
def settings():
    """Leaves torch's settings as they were."""
    before = allocator.read_settings()
    yield before
    allocator.write_settings(before)


def fake(monkeypatch, **state: int) -> Cuda:
    cuda = Cuda(**state)
    for name in ("empty_cache", "memory_reserved", "memory_stats", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return cuda


def test_settings_of_the_environment_stay():
    assert merge_settings("", WANTED) == "expandable_segments:True,max_split_size_mb:64"
    other = "roundup_power2_divisions:[64:8,>:1],garbage_collection_threshold:0.8"
    assert merge_settings(other, WANTED) == f"{other},expandable_segments:True,max_split_size_mb:64"
    assert merge_settings("expandable_segments: true,a:1", WANTED) == (
        "expandable_segments: true,a:1,max_split_size_mb:64"
    )


def test_a_contradiction_to_the_environment_is_refused():
    with pytest.raises(ConfigError, match="has expandable_segments:False, and this callback expandable_segments:True"):
        merge_settings("expandable_segments:False", WANTED)


def test_torch_takes_the_settings(monkeypatch, settings):
    """A CPU build has the parser, too."""
    fake(monkeypatch, cached=5 * GIB)  # of a run before: given back
    assert set_up(WANTED, DEVICE) == settings
    assert allocator.read_settings().endswith("expandable_segments:True,max_split_size_mb:64")
    with pytest.raises(ValueError, match="max_split_size_mb too small, must be >= 20"):
        allocator.write_settings("max_split_size_mb:19")


def test_settings_that_come_too_late_are_refused(monkeypatch, settings):
    fake(monkeypatch, reserved=3 * GIB)
    with pytest.raises(ConfigError) as caught:
        set_up({"expandable_segments": "True"}, DEVICE)
    assert str(caught.value) == (
        "callbacks.memory: expandable_segments:True comes too late, since this process holds 3.00 GiB of cuda:0; make "
        "the Trainer before tensors on the GPU, or start with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert allocator.read_settings() == settings


@pytest.mark.parametrize("more", [0, 1])
def test_a_little_memory_may_have_other_settings(more, monkeypatch, settings):
    fake(monkeypatch, reserved=allocator.SMALL + more)
    with pytest.raises(ConfigError) if more else nullcontext():
        set_up(WANTED, DEVICE)


def test_torch_that_tells_no_settings(monkeypatch, settings):
    fake(monkeypatch)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(allocator, "WRITTEN", [])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")
    assert allocator.read_settings() == "max_split_size_mb:32"
    assert set_up({"expandable_segments": "True"}, DEVICE) == "max_split_size_mb:32"
    assert allocator.read_settings() == "max_split_size_mb:32,expandable_segments:True"


def test_settings_that_hold_already_are_left_alone(monkeypatch, settings):
    cuda = fake(monkeypatch, reserved=3 * GIB)
    allocator.write_settings("expandable_segments:True,max_split_size_mb:64")
    assert set_up(WANTED, DEVICE) == "expandable_segments:True,max_split_size_mb:64"
    assert not cuda.emptied


def test_peak_resident_memory_grows_with_pages_that_are_written_and_stays():
    before = peak_resident()
    with mmap.mmap(-1, 256 << 20) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        during = peak_resident()
    assert during >= 256 << 20
    few = 4 << 20  # the kernel adds pages up in lots
    assert peak_resident() >= during - few
    with ExitStack() as undo:
        assert watch_resident(undo)() >= during - few
    assert during < before + (300 << 20)


def test_a_full_gpu_and_an_emptied_cache_are_reported_when_the_counters_grow(monkeypatch):
    cuda = fake(monkeypatch)
    cuda.stats |= {"num_alloc_retries": 4, "num_device_free": 9}  # before the first look
    watch = Watch(DEVICE)
    assert watch.look() == []
    cuda.stats["num_device_free"] += 3
    (text,) = watch.look()
    assert text.startswith("3 block(s) of GPU memory were given back") and "torch.cuda.empty_cache()" in text
    cuda.stats["num_device_free"] += 7
    cuda.stats["num_alloc_retries"] += 2
    (text,) = watch.look()
    assert text.startswith("the GPU was full 2 time(s)") and "micro_batch" in text
    assert watch.look() == []


def test_memory_that_auto_batch_gave_back_is_not_reported(monkeypatch):
    """Nor the failed request that made it halve, which the allocator has tried twice."""
    cuda = fake(monkeypatch)
    watch = Watch(DEVICE)
    drop_gradients([], torch.device("cuda", 1))  # another device's
    cuda.stats["num_device_free"] += 1
    assert len(watch.look()) == 1
    drop_gradients([], DEVICE)
    cuda.stats |= {"num_alloc_retries": 1, "num_device_free": 9}
    assert watch.look() == []
    cuda.stats["num_device_free"] += 2
    assert watch.look()[0].startswith("2 block(s) of GPU memory were given back")


def test_fragmentation_is_reported_once_with_both_numbers(monkeypatch):
    cuda = fake(monkeypatch)
    watch = Watch(DEVICE)
    cuda.stats |= {"reserved_bytes.all.peak": 66 * GIB, "allocated_bytes.all.peak": 50 * GIB}  # a fifth of 80: not more
    assert watch.look() == []
    cuda.stats |= {"reserved_bytes.all.peak": 70 * GIB}
    (text,) = watch.look()
    assert text.startswith("70.00 GiB are reserved, and 20.00 of them were never in use: fragmentation")
    assert watch.look() == []
