"""Deferred steps have the bits of those that wait, for every kind of model, setting, codec, or they are refused."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import prune
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.overlap.send_order import PASSES
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw, lamb, sgd
from trainer.optim.schedule import Constant, Linear
from trainer.plan import Plan
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS = 6


class Tied(nn.Module):
    """The embedding is the output layer, as in BERT, and a scale is nobody's but the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 24)
        self.hidden = nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)])
        self.output = nn.Linear(24, 10)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 10
        return self.output(self.hidden(self.embedding(tokens).mean(1)) * self.scale)[:, :4]


class Attention(nn.Module):
    """torch's own, which uses the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1), 2, enable_nested_tensor=False)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)[None])[0])


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.get_submodule("2").requires_grad_(False)
        self.get_parameter("4.bias").requires_grad_(False)


class Skipping(nn.Module):
    """Has a layer that is not called in the rehearsal, only its weight used; later it is called."""

    late = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.first(x)
        if (self.calls > PASSES) == self.late:
            return self.last(x + self.rare(x))
        return self.last(x + nn.functional.linear(x, self.rare.weight, self.rare.bias))


class Misled(Skipping):
    """The other way round."""

    late = False


class Branching(nn.Module):
    """Data decides which layers a micro-batch uses: `often` by some ranks in most steps, `seldom` by none in some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.seldom, self.last = (nn.Linear(8, n) for n in (8, 8, 8, 4))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.often(self.first(x)) if x[0, 0] > 0.5 else self.first(x)
        return self.last(x + self.seldom(x) if x[0, 1] > 0.8 else x)


class Normed(nn.Sequential):
    """Has running statistics: rank 0's count, as with DDP."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


class Pruned(nn.Sequential):
    """Hooks of the modules make the weights before each call, of parameters with other names."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        for name in "02":
            prune.l1_unstructured(self.get_submodule(name), "weight", 0.5)


class Images(nn.Module):
    """Weights that do not lie in memory row by row, which fused optimizers walk as they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x.view(-1, 2, 2, 2)).flatten(1).tanh())


class Of(Toy):
    def __init__(self, net: type[nn.Module] | None) -> None:
        super().__init__(width=40, depth=3, dropout=0.1)
        self.net = net

    def model(self) -> nn.Module:
        return self.net() if self.net else super().model()


class Track(Callback):
    """The weights after each step, flushed or as validation finds them."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.validated: list[bytes] = []
        self.lags: list[int] = []

    def on_step_end(self, trainer) -> None:
        self.lags.append(trainer.lag)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self.validated.append(b"".join(p.detach().numpy().tobytes() for p in trainer.module.parameters()))


def compress(codec: str, **knobs: Any) -> dict[str, Any]:
    return {"others": lambda: {"grad_compress": GradCompress(codec, **knobs)}}


CASES: dict[str, dict[str, Any]] = {
    "int8": compress("int8"),
    "topk": compress("topk", density=0.3),
    "powersgd": compress("powersgd", rank=2),
    "hierarchical": {"others": lambda: {"hierarchical": Hierarchical(ranks_per_node=1)}},
    "decay": {"optimizer": lambda groups: adamw(groups, weight_decay=0.3)},
    "tied": {"net": Tied},
    "attention": {"net": Attention, "mib": 0.0005},
    "frozen": {"net": Frozen},
    "skipping": {"net": Skipping, "mib": 0.0005},
    "unused": {
        "net": Branching, "mib": 0.0002, "accumulate": 2, "unused": True,
        "optimizer": lambda groups: adamw(groups, weight_decay=0.3),
    },
    "warm-up": {"schedule": Linear(warmup=3)},
    "accumulate": {"accumulate": 2, "net": Tied},
    "buffers": {"accumulate": 2, "net": Normed},
    "images": {"net": Images},
    "pruned": {"net": Pruned},
    "sgd": {"optimizer": lambda groups: sgd(groups, nesterov=True, weight_decay=0.1)},
    "lamb": {"optimizer": lambda groups: lamb(groups, weight_decay=0.1), "schedule": Linear(warmup=3)},
    "bf16": {"precision": "bf16"},
}  # fmt: skip
QUICK = ("int8", "hierarchical", "pruned", "accumulate")  # in each run of the tests


def train(place: Place, case: str, overlapped: bool) -> tuple[list[bytes], list[int], dict[str, float]]:
    setting, track, run = CASES[case], Track(), "deferred" if overlapped else "plain"
    trainer = Trainer(
        Of(setting.get("net")),
        {"track": track, **setting.get("others", dict)(), **({"overlap": Overlap()} if overlapped else {})},
        setting.get("optimizer", adamw),
        setting.get("schedule", Constant()),
        batch=12,
        accumulate=setting.get("accumulate"),
        options=Options(
            max_steps=STEPS, validate_every=2, precision=setting.get("precision", "fp32"), log_every_steps=1,
            run_dir=f"runs/{run}", checkpoint=CheckpointOptions(every_steps=3),
            ddp=DDPOptions(setting.get("mib", 0.002), find_unused_parameters=setting.get("unused", False)),
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    numbers = {k: v for k, v in {**trainer.last_metrics, **trainer.validation}.items() if k != "train/grad_norm"}
    return track.validated, track.lags, numbers


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True:UserWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_bits_are_those_without_it(case, tmp_path):
    plain, deferred = run_ranks(3, train, case, False), run_ranks(3, train, case, True)
    for rank in range(3):
        assert deferred[rank][0] == plain[rank][0]
        assert deferred[rank][2] == plain[rank][2]
        assert plain[rank][1] == [0] * STEPS and deferred[rank][1] == [1] * STEPS
    assert len(set(plain[0][0])) == STEPS // 2  # it did train
    logs = [Path(f"runs/{run}/logs/rank0.log").read_text() for run in ("plain", "deferred")]
    assert ["train/grad_norm is not reported" in log for log in logs] == [False, True]
    for step in (3, 6):  # before the checkpoint of step 3 no validation has brought the weights up to date
        for part in ("model", "optimizer"):
            one, other = (Path(f"ckpt/{run}/step-{step:08d}/{part}.safetensors") for run in ("plain", "deferred"))
            assert one.read_bytes() == other.read_bytes()


class Counting(torch.optim.SGD):
    """How many parameters each call of `step` is handed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.handed: list[int] = []

    def step(self, closure: None = None) -> None:
        self.handed.append(sum(len(group["params"]) for group in self.param_groups))
        super().step()


class Layout(Callback):
    def on_fit_end(self, trainer) -> None:
        self.sizes = [len(bucket) for bucket in trainer.buckets]


class Slow(Callback):
    """Every reduction takes longer than the passes, so that buckets come one by one."""

    role = Role.REDUCE

    def wrap_reduce(self, trainer, reduce):
        def slow(flat, bucket):
            time.sleep(0.03)
            return reduce(flat, bucket)

        return slow


def handed(place: Place, slow: bool) -> tuple[list[int], list[int]]:
    layout = Layout()
    trainer = Trainer(
        Of(None), {"overlap": Overlap(), "layout": layout, **({"slow": Slow()} if slow else {})}, Counting, batch=12,
        options=Options(max_steps=2, ddp=DDPOptions(0.005)), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return trainer.optimizer.handed, layout.sizes


def test_a_bucket_is_stepped_alone(tmp_path):
    """Where it comes alone: the optimizer never walks parameters that are not stepped, and steps each once."""
    for steps, sizes in run_ranks(3, handed, True):
        assert sum(sizes) == 10 and len(sizes) > 2
        *first, last = steps  # the second step's buckets are all waited for together, at the end
        assert len(first) > 2 and sum(first) == last == 10
    for steps, sizes in run_ranks(3, handed, False):
        assert sum(steps) == 2 * sum(sizes)


class Breaks(Callback):
    """The second reduction after the rehearsal fails on every rank: with one bucket, that of the second step."""

    role = Role.COMPRESS

    def wrap_reduce(self, trainer, reduce):
        calls = 0

        def broken(flat, bucket):
            nonlocal calls
            calls += not trainer.rehearsing
            if calls == 2:
                raise ConnectionResetError(f"rank {trainer.rank} lost its peer")
            return reduce(flat, bucket)

        return broken


def broken_run(place: Place, net: type[nn.Module] | None, mib: float, **callbacks: Callback) -> tuple[str, str, int]:
    trainer = Trainer(
        Of(net), {"overlap": Overlap(), **callbacks}, batch=12,
        options=Options(max_steps=4, ddp=DDPOptions(mib)), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    try:
        trainer.fit()
    except Exception as error:
        return type(error).__name__, str(error), trainer.step
    return "", "", trainer.step


def misled(place: Place) -> tuple[str, str, int]:
    return broken_run(place, Misled, 0.0001, slow=Slow())


def broken_by_a_peer(place: Place) -> tuple[str, str, int]:
    return broken_run(place, None, 25.0, breaks=Breaks())


def test_a_failed_reduction_is_that_error_in_the_main_thread(tmp_path):
    """It failed beside the second step, and is met in the forward pass of the third."""
    results = run_ranks(3, broken_by_a_peer)
    assert results == [("ConnectionResetError", f"rank {rank} lost its peer", 2) for rank in range(3)]
    # no file: it is not one of torch's errors, of which the flight recorder's collectives would tell more
    assert not list(Path("runs").glob("*/logs/collectives-*"))


def test_a_weight_used_before_its_step_is_an_error(tmp_path):
    """Never a silent use of the step before."""
    for kind, text, step in run_ranks(3, misled):
        assert (kind, step) == ("RuntimeError", 1)
        assert "modified by an inplace operation" in text
    noted = list(Path("runs").glob("*/logs/collectives-rank*.json"))
    assert len(noted) == 3 and all("gloo:all_reduce" in path.read_text() for path in noted)


@pytest.mark.parametrize("feature", ["clip", "clip_value", "fp16", "static_graph"])
def test_what_needs_all_gradients_at_once_is_refused_by_name(feature):
    settings = {"clip": {"clip_norm": 1.0}, "clip_value": {"clip_value": 1.0}, "fp16": {"precision": "fp16"}}
    options = Options(**settings.get(feature) or {"ddp": DDPOptions(**{feature: True})})
    with pytest.raises(
        ConfigError, match=f"^overlap and {feature} can't run together: .*; (set|use) .* leave overlap out$"
    ):
        Plan(
            Toy(), {"overlap": Overlap()}, Constant(), batch=12, micro_batch=None, accumulate=None, options=options,
            data=DataOptions(), place=Place(world=3), each=lambda value: [value],
        )  # fmt: skip


class Reads(Callback):
    def on_before_optimizer_step(self, trainer) -> None:
        pass


def test_who_reads_reduced_gradients_is_refused():
    with refuses("reads and overlap can't run together", "gradients"):
        arrange({"overlap": Overlap(), "reads": Reads()}, set())


class Sometimes(Skipping):
    """After the rehearsal a layer is not used at all."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.first(x)
        return self.last(x + self.rare(x) if self.calls <= PASSES else x)


class Lately(Skipping):
    """Already the last pass of the rehearsal leaves a layer out."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.first(x)
        return self.last(x + self.rare(x) if self.calls < PASSES else x)


@pytest.mark.parametrize("net", [Sometimes, Lately])
def test_a_parameter_without_a_gradient_is_an_error(net, tmp_path):
    for kind, text, step in run_ranks(3, broken_run, net, 0.0005):
        assert (kind, step) == ("ConfigError", 0)
        names, _, rest = text.removeprefix("overlap: no gradient for ").partition(
            " in the last micro-batch of a step; "
        )
        assert sorted(names.split(", ")) == ["rare.bias", "rare.weight"] and rest.startswith("use every parameter")


@pytest.mark.parametrize(("backend", "asked", "mib"), [("gloo", None, 1.0), ("nccl", None, 25.0), ("nccl", 4.0, 4.0)])
def test_buckets_are_small_unless_each_is_a_call_of_nccl(backend, asked, mib):
    trainer: Any = SimpleNamespace(ddp={"bucket_cap_mb": asked}, ranks=SimpleNamespace(backend=backend))
    Overlap().wrap_model(trainer, nn.Linear(1, 1))
    assert trainer.ddp["bucket_cap_mb"] == mib
