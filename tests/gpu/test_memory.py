"""Memory that runs out on one CUDA device: the limit, the advice, the snapshot."""

import pytest
import torch
from support.gpu import on_device, only_gpu
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.config.options import DataOptions, Options
from trainer.errors import message
from trainer.monitors.memory import allocator
from trainer.monitors.memory.callback import Memory
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, only_gpu]


class Greedy(Toy):
    """Takes a third of the device in the third call."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        third = torch.cuda.get_device_properties(0).total_memory // 3
        self.held = torch.empty(third if self.calls == 3 else 1, dtype=torch.uint8, device="cuda")
        return super().loss(model, batch)


def make(memory: Memory) -> Trainer:
    return Trainer(
        Greedy(),
        {"memory": memory},
        batch=12,
        options=Options(max_steps=4, log_every_steps=1, accelerator="cuda"),
        data=DataOptions(workers=0),
        place=Place(),
    )


def expandable() -> bool:
    """What the allocator itself says."""
    return torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]


def test_above_the_share_the_run_ends_with_advice_and_a_snapshot():
    trainer = make(Memory(max_share=0.25, expandable_segments=True, snapshot=True))
    assert expandable()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit()
    last = message(caught.value).splitlines()[-1]
    assert "callbacks.memory.max_share=0.25" in last and "micro_batch=6" in last
    assert (trainer.run_dir / "logs" / "memory-rank0.pickle").stat().st_size > 1000
    assert not expandable() or torch.__version__.startswith("2.11.")  # which resets no setting that a text leaves out


def test_the_peak_counts_what_was_freed_again():
    trainer = make(Memory())
    trainer.fit()
    third = torch.cuda.get_device_properties(0).total_memory / 3 / allocator.GIB
    assert trainer.last_metrics["perf/peak_memory_gib"] == pytest.approx(third, rel=0.05)


def test_settings_after_tensors_are_refused():
    held = torch.empty(1 << 28, device="cuda")
    with pytest.raises(ValueError, match="comes too late"):
        make(Memory(expandable_segments=True))
    del held
