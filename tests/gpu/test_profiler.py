"""A trace of one CUDA device: its kernels beside the regions, and torch's snapshot of allocations."""

import gzip
import json
import pickle
from pathlib import Path

import torch
from support.gpu import on_device, only_gpu
from toy_recipe import Toy

from trainer.config.options import DataOptions, Options
from trainer.monitors.advice.callback import Advice
from trainer.monitors.profiler.callback import Profiler
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, only_gpu]


def test_a_trace_has_the_kernels_and_a_snapshot_the_allocations() -> None:
    callbacks = {"advice": Advice(), "profiler": Profiler(first=3, active=2, profile_memory=True)}
    options = Options(max_steps=6, log_every_steps=1, run_dir="runs/r", accelerator="cuda", precision="fp32")
    Trainer(Toy(), callbacks, batch=12, place=Place(), data=DataOptions(workers=0), options=options).fit()
    folder = Path("runs/r/profile/rank0")
    assert sorted(path.name for path in folder.iterdir()) == ["memory-3.pickle", "step-3.json.gz", "summary.txt"]
    with gzip.open(folder / "step-3.json.gz") as file:
        events = json.load(file)["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"kernel", "cuda_runtime", "user_annotation"} <= kinds
    assert {"forward", "backward", "optimizer", "ProfilerStep#3"} <= {event["name"] for event in events}
    assert pickle.loads((folder / "memory-3.pickle").read_bytes())["segments"]
    assert "CUDA" in (folder / "summary.txt").read_text()
    found = [json.loads(line)["name"] for line in Path("runs/r/advice.jsonl").read_text().splitlines()]
    assert ("tf32" in found) == (torch.cuda.get_device_capability() >= (8, 0))
