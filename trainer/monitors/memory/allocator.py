"""Reads and sets torch's CUDA caching allocator, and finds out when it costs time."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from trainer.errors import ConfigError
from trainer.parallel.memory_search import EMPTIED

GIB = 1 << 30
STATUS = 1 << 14  # bytes, more than /proc/self/status has
SMALL = 1 << 26  # bytes that may have been reserved with other settings
WRITTEN: list[str] = []  # the settings that this process has written last
UNUSED = 0.2  # share of the device, reserved at the peak and never allocated, above which fragmentation is reported


def read_settings() -> str:
    """Return the current settings: from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, or set later."""
    if read := getattr(torch._C, "_accelerator_getAllocatorSettings", None):  # torch 2.11 has none
        return read()
    of_process = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return WRITTEN[-1] if WRITTEN else of_process


def write_settings(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportAttributeAccessIssue]
    WRITTEN[:] = [settings]


def merge_settings(settings: str, wanted: Mapping[str, str]) -> str:
    """Return `settings` with those `wanted` added, because torch resets what a new text leaves out."""
    known = dict(part.strip().split(":", 1) for part in settings.split(",") if ":" in part)
    for key, value in wanted.items():
        if known.get(key, value).strip().lower() != value.lower():
            both = f"PYTORCH_ALLOC_CONF has {key}:{known[key]}, and this callback {key}:{value}"
            raise ConfigError(f"callbacks.memory: {both}; leave one out")
    new = [f"{key}:{value}" for key, value in wanted.items() if key not in known]
    return ",".join([*filter(None, [settings]), *new])


def set_up(wanted: Mapping[str, str], device: torch.device) -> str:
    """Apply the `wanted` settings, and return the previous ones.

    torch reads the settings as it reserves a segment, so existing segments keep the previous ones. A process that
    already holds more than 64 MiB of CUDA memory is refused.
    """
    before = read_settings()
    settings = merge_settings(before, wanted)
    if settings == before:
        return before
    torch._C._cuda_clearCublasWorkspaces()  # of a run before, in this process, and its cache
    torch.cuda.empty_cache()
    if (held := torch.cuda.memory_reserved(device)) > SMALL:
        text = ",".join(f"{key}:{value}" for key, value in wanted.items())
        raise ConfigError(
            f"callbacks.memory: {text} comes too late, since this process holds {held / GIB:.2f} GiB of {device}; "
            f"make the Trainer before tensors on the GPU, or start with PYTORCH_ALLOC_CONF={text}"
        )
    write_settings(settings)
    return before


def peak_resident() -> int:
    """Return the largest resident memory of this process so far, in bytes (VmHWM of Linux)."""
    with ExitStack() as undo:
        return watch_resident(undo)()


def watch_resident(undo: ExitStack) -> Callable[[], int]:
    """Return a function that reads `peak_resident` at a fifth of the cost: the file stays open until `undo`."""
    status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    undo.callback(os.close, status)
    return lambda: int(os.pread(status, STATUS, 0).partition(b"VmHWM:")[2].split(None, 1)[0]) << 10


class Watch:
    """Compares the allocator's counters with those of the previous look.

    A callback that halves micro-batches reports a full GPU itself; steps since the previous look are then ignored.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.total = device, torch.cuda.get_device_properties(device).total_memory
        self.retries, self.freed, self.emptied = 0, 0, 0
        self.fragmented = False
        self.look()  # start-up may free memory

    def look(self) -> list[str]:
        """Return a warning for each thing that cost time, or may end the run, since the previous look."""
        stats = torch.cuda.memory_stats(self.device)
        retries, freed = stats["num_alloc_retries"], stats["num_device_free"]
        new, again, self.retries, self.freed = retries - self.retries, freed - self.freed, retries, freed
        if EMPTIED[self.device] > self.emptied:
            self.emptied, new, again = EMPTIED[self.device], 0, 0
        found = []
        if new:
            found.append(
                f"the GPU was full {new} time(s): the allocator gave its unused memory back and asked again, which "
                "waits for the GPU; give a smaller micro_batch, or callbacks.memory.expandable_segments=true"
            )
        elif again:
            found.append(
                f"{again} block(s) of GPU memory were given back, which waits for the GPU; leave out "
                "torch.cuda.empty_cache() and garbage_collection_threshold"
            )
        if not self.fragmented and (unused := unused_at_peak(stats)) > UNUSED * self.total:
            self.fragmented = True
            reserved = stats["reserved_bytes.all.peak"]
            found.append(
                f"{reserved / GIB:.2f} GiB are reserved, and {unused / GIB:.2f} of them were never in use: "
                "fragmentation; callbacks.memory.expandable_segments=true avoids it"
            )
        return found


def unused_at_peak(stats: Mapping[str, int]) -> int:
    """Return the bytes by which the peak of reserved memory exceeds the peak of allocated memory."""
    return stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"]
