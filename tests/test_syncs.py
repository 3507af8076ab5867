"""Callbacks that each read one number from the device in each step would make it wait for all of them: none does."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.callbacks import CHANGES, CODECS, OBSERVERS, name_of
from support.quick import quick
from support.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.comm.bucket import Bucket
from trainer.comm.codecs import sparse
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce, Background
from trainer.config.options import DataOptions, Options
from trainer.optim.factories import adamw, sgd
from trainer.parallel.strategy import clip_gradients
from trainer.process.environment import Place
from trainer.trainer import Trainer

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}

SETS = [
    ("ema", "overlap"), ("local_sgd", "int8"), ("hierarchical", "fp16"), ("bucket", "topk"), ("onebit_adam",),
    ("activation_checkpoint", "powersgd"), ("activation_checkpoint.offload", "bf16"),
]  # fmt: skip


class Reads(TorchDispatchMode):
    """Operations that hand a device's numbers to Python, by step: of this thread, and of those that reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = [[]]
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in READS:
            self.steps[-1].append(name)
        return func(*args, **(kwargs or {}))


class Counted(Toy):
    """Without a count of what counts, which data workers would make."""

    def weight(self, batch: dict[str, Any]) -> int:
        return len(batch["x"])


class Watch(Callback):
    role = Role.OBSERVE

    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def on_step_end(self, trainer) -> None:
        self.reads.steps.append([])


def reads(place: Place, names: tuple[str, ...]) -> list[list[str]]:
    mode = Reads()
    table = {**OBSERVERS, **CHANGES, **CODECS}
    trainer = Trainer(
        Counted(), {**{name_of(name): table[name]() for name in names}, "watch": Watch(mode)},
        adamw if "onebit_adam" in names else sgd, batch=12,
        options=Options(max_steps=9, log_every_steps=4, validate_every=9), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    beside = Reads()
    beside.steps = mode.steps
    run = Background._run

    def watched(self: Background, *args: Any) -> None:
        with beside:
            run(self, *args)

    with mode, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Background, "_run", watched)
        patch.setattr(sparse, "reaching_cpu", sparse.reaching)
        trainer.fit()
    return mode.steps


@pytest.mark.parametrize("names", quick([[*names] for names in SETS], 2), ids="+".join)
def test_steps_that_are_not_logged_read_nothing(names, tmp_path):
    for steps in run_ranks(2, reads, (*OBSERVERS, *names)):
        assert steps[3] and steps[7]  # logged: the loss is read, and is seen to be
        if "onebit_adam" in names:
            assert len(steps[2]) == 1  # where its warm-up ends, it reads the optimizer's count
            steps[2].clear()
        assert not any(steps[step] for step in (1, 2, 4, 5, 6))


def codec_reads(place: Place) -> dict[str, list[str]]:
    """Of each codec in its second step. What differs on a CPU is told to do as on a GPU."""
    ranks, modes = Ranks(place, "cpu", "gloo", 60.0), {}
    reduce = AllReduce(ranks.new_group())
    for name, make in CODECS.items():
        compress, params, mode = make(), [torch.randn(40, 30), torch.randn(30)], Reads()
        assert isinstance(compress, GradCompress)
        compress.codec.join(place.world, place.rank, 0)
        for step in range(2):
            flat = torch.cat([p.view(-1) for p in params])
            with mode if step else Reads(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(sparse, "reaching_cpu", sparse.reaching)
                compress.codec.mean(flat, flat, Bucket.of(params, step), reduce)
        modes[name] = mode.steps[0]
    ranks.close()
    return modes


def test_codecs_read_nothing():
    """But for blocksparse, whose card says so."""
    for modes in run_ranks(2, codec_reads):
        assert modes.pop("blocksparse") == ["nonzero"]
        assert not any(modes.values()), modes


def test_nan_guard_waits_for_the_device_once_a_step(monkeypatch):
    """However many micro-batches and parameters there are: by one copy of two numbers."""
    params = [torch.nn.Parameter(torch.ones(3, i + 1)) for i in range(5)]
    for p in params[1:]:  # the first has no gradient
        p.grad = torch.full_like(p, 2.0)
    trainer: Any = SimpleNamespace(
        losses=[torch.tensor(0.5), torch.tensor(float("nan")), torch.tensor(2.0)],
        data=SimpleNamespace(weights=[2, 0, 4]), weight=6, world=1, device=torch.device("cpu"), parameters=params,
        scaler=torch.amp.GradScaler("cpu", enabled=False), ranks=SimpleNamespace(agree=lambda values: lambda: values),
        strategy=SimpleNamespace(data_world=1, clip=lambda most: clip_gradients(params, most)),
    )  # fmt: skip
    mode, copies, tolist = Reads(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (copies.append(self.numel()), tolist(self))[1])
    with mode:
        bad, loss, norm = NanGuard()._agreed(trainer)
    assert (copies, mode.steps) == ([2], [[]])
    assert (mode.calls["_foreach_norm"], mode.calls["linalg_vector_norm"]) == (1, 1)  # not one for each parameter
    assert (bad, loss) == (0, 1.5) and norm == pytest.approx((4 * 3 * (2 + 3 + 4 + 5)) ** 0.5, rel=1e-6)
