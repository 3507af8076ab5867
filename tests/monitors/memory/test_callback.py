"""The peak in the run's numbers, and an error that ends with advice: on a CPU, and with torch.cuda faked."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cli import run as run_command
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.callbacks.overlap import Overlap
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard import Shard
from trainer.config.options import DataOptions, DDPOptions, Options
from trainer.errors import ConfigError, message
from trainer.monitors.memory import allocator, callback
from trainer.monitors.memory.advice import Use
from trainer.monitors.memory.allocator import GIB
from trainer.monitors.memory.callback import Memory
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

PEAK = 5 << 30
PARAMETERS = 8 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 4 + 4  # of the toy


class Full(Toy):
    """Runs out of memory in the forward pass of one call of the loss."""

    def __init__(self, at: int, error: Exception | None = None) -> None:
        super().__init__()
        self.calls, self.at, self.error = 0, at, error

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += model.training  # not validation, nor its trial
        if self.calls == self.at and model.training:
            if self.error:
                raise self.error
            torch.empty(1 << 60)
        return super().loss(model, batch)


def make(
    recipe: Toy,
    place: Place | None = None,
    memory: Memory | None = None,
    ddp: DDPOptions | None = None,
    **callbacks: Callback,
) -> Trainer:
    return Trainer(
        recipe,
        {"memory": memory or Memory(), **callbacks},
        batch=12,
        accumulate=2,
        options=Options(max_steps=4, log_every_steps=2, ddp=ddp or DDPOptions()),
        data=DataOptions(workers=0),
        place=place or Place(),
    )


def fake_peak(monkeypatch, peak: int = PEAK) -> None:
    monkeypatch.setattr(allocator, "watch_resident", lambda undo: lambda: peak)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"max_share": 0.0}, "callbacks.memory.max_share=0.0: must be more than 0"),
        ({"max_share": 1.5}, "callbacks.memory.max_share=1.5: must be at most 1"),
        ({"max_share": float("nan")}, "callbacks.memory.max_share=nan: must be more than 0"),
        ({"max_split_mib": 19}, "callbacks.memory.max_split_mib=19: must be at least 20"),
    ],
)
def test_refused(knobs: dict[str, Any], reason: str):
    with pytest.raises(ConfigError) as caught:
        Memory(**knobs)
    assert str(caught.value) == reason


def test_the_peak_is_a_number_of_each_logged_step_and_of_the_summary(monkeypatch):
    fake_peak(monkeypatch)
    trainer = make(Toy())
    trainer.fit()
    assert trainer.last_metrics["perf/peak_rss_gib"] == 5.0
    assert json.loads((trainer.run_dir / "summary.json").read_text())["perf/peak_rss_gib"] == 5.0


def peak_of_rank(place: Place) -> tuple[float, float]:
    patch = pytest.MonkeyPatch()
    fake_peak(patch, (2, 7, 3)[place.rank] * GIB)
    trainer = make(Toy(), place)
    trainer.fit()
    patch.undo()
    return trainer.last_metrics["perf/peak_rss_gib"], trainer.last_metrics["perf/memory_skew"]


def test_the_peak_is_that_of_the_rank_with_the_most():
    assert run_ranks(3, peak_of_rank) == [(7.0, 5 / 7)] * 3


@pytest.mark.parametrize("knobs", [{}, {"max_share": 0.5, "expandable_segments": True, "snapshot": True}])
def test_on_a_cpu_one_line_names_the_knobs_without_effect(knobs, messages):
    make(Toy(), memory=Memory(**knobs)).fit()
    found = [text for text in messages if text.startswith("memory: ")]
    assert found == (
        ["memory: max_share, expandable_segments, snapshot need(s) a GPU, and this run is on cpu"] * bool(knobs)
    )


@pytest.mark.parametrize(("at", "state"), [(1, "optimizer, to come 0.00"), (5, "optimizer 0.00")])
def test_an_error_ends_with_the_bytes_and_the_advice(at, state, monkeypatch):
    """torch's own error of the CPU; at the first pass there is no state yet."""
    fake_peak(monkeypatch)
    trainer = make(Full(at))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as caught:
        trainer.fit()
    text = message(caught.value)
    assert text.startswith("Traceback")
    assert text.splitlines()[-1] == (
        f"echelon: batch=12, micro_batch=6: out of memory; peak 5.00 GiB (weights 0.00, gradients 0.00, "
        f"{state}, activations and the rest 5.00); try micro_batch=3, with the same batch (up to 2.50 GiB less), "
        "'+callbacks=[activation_checkpoint]' (up to 2.50 GiB less), "
        "'+callbacks=[auto_batch]' (finds micro_batch itself)"
    )


def test_bytes_are_counted(monkeypatch):
    fake_peak(monkeypatch)
    monkeypatch.setattr("trainer.monitors.memory.callback.advise", lambda use, setting: (seen.append(use), "x")[1])
    seen: list[Any] = []
    with pytest.raises(torch.OutOfMemoryError):
        make(Full(3, torch.OutOfMemoryError("Tried to allocate 20.00 MiB"))).fit()
    (use,) = seen
    held = 4 * PARAMETERS
    assert (use.peak, use.weights, use.gradients, use.expected) == (PEAK, held, held, False)
    assert use.state == 2 * held + 4 * 8  # two moments, and a counter for each of 8 parameters


def advice_of_rank(place: Place, stage: int, views: bool) -> tuple[int, int]:
    others = {"shard": Shard(stage)} if stage else {}
    trainer = make(Toy(), place, ddp=DDPOptions(gradient_as_bucket_view=views), **others)
    trainer.fit()
    use = callback.count(trainer, None)
    return use.gradients, use.weights


@pytest.mark.parametrize(
    ("stage", "views", "times"), quick([(0, False, 2), (0, True, 1), (1, False, 2), (2, False, 1)], 2)
)
def test_gradients_count_twice_beside_buckets_of_their_own(stage, views, times):
    assert run_ranks(3, advice_of_rank, stage, views) == [(times * 4 * PARAMETERS, 4 * PARAMETERS)] * 3


STAGES = {"shard.1", "shard.2", "shard.3"}


@pytest.mark.parametrize(
    ("others", "features", "refused"),
    [
        ({}, set(), set()),
        ({"own": Overlap()}, set(), {"auto_batch", *STAGES}),
        ({}, {"bf16_params"}, {"shard.3"}),
        ({}, {"find_unused_parameters"}, {"auto_batch", "shard.2", "shard.3"}),
        ({"pipeline": PipelineParallel()}, set(), {"auto_batch", "shard.2", "shard.3"}),
        ({"shard": Shard(1)}, set(), STAGES),
        ({"c": Compile(backend="eager")}, set(), {"activation_checkpoint"}),
    ],
)
def test_the_advice_names_nothing_that_the_run_refuses(others, features, refused, tmp_path, monkeypatch):
    trainer = fake_trainer(tmp_path)
    trainer.callbacks, trainer.plan.features = others, lambda: features
    monkeypatch.setattr(callback, "saved_bytes", lambda *_: 1.0)
    use = Use(GIB, 0, 0, 0, False)
    found = callback.setting(trainer, use)
    assert {"adamw8bit", "lars"} <= set(found.optimizers)
    named = {*found.saved, *found.finds}
    words = {name: f"'+callbacks=[{name}]'" for name in ("activation_checkpoint", "auto_batch")}
    words |= {name: f"'+callbacks=[shard]' callbacks.shard.stage={name[-1]}" for name in STAGES}
    assert {name for name, text in words.items() if text not in named} == refused
    trainer.plan.order = None
    assert not callback.setting(trainer, use).finds


def test_a_callback_that_recomputes_is_not_advised(monkeypatch):
    fake_peak(monkeypatch)
    with pytest.raises(MemoryError) as caught:
        make(Full(1, MemoryError()), activation_checkpoint=ActivationCheckpoint()).fit()
    assert "activation_checkpoint" not in caught.value.advice and "micro_batch=3" in caught.value.advice


def test_an_error_in_the_optimizers_step_gets_advice(monkeypatch):
    fake_peak(monkeypatch)

    def full(params: Any) -> torch.optim.Optimizer:
        optimizer = adamw(params)
        optimizer.register_step_pre_hook(lambda *_: torch.empty(1 << 60))
        return optimizer

    trainer = Trainer(Toy(), {"memory": Memory()}, full, batch=12, data=DataOptions(workers=0),
                      options=Options(max_steps=1), place=Place())  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    assert "optimizer, to come 0.00" in message(caught.value).splitlines()[-1]


def test_other_errors_get_no_advice():
    with pytest.raises(ZeroDivisionError) as caught:
        make(Full(2, ZeroDivisionError())).fit()
    with pytest.raises(RuntimeError) as other:
        make(Full(2, RuntimeError("shapes"))).fit()
    assert not hasattr(caught.value, "advice") and not hasattr(other.value, "advice")


def test_the_command_ends_with_the_advice(tmp_path: Path):
    """In the terminal, and in the summary."""
    (tmp_path / "full.py").write_text(
        "import torch\nfrom toy_recipe import Toy\n\n\nclass Full(Toy):\n    def loss(self, model, batch):\n"
        "        return torch.empty(1 << 60) if model.training else super().loss(model, batch)\n"
    )
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "full.yaml").write_text("_target_: full.Full\n")
    done = run_command(
        ["--config-dir", "conf", "recipe=full", "trainer.allow_targets=[full]", "batch=12", "trainer.max_steps=2",
         "trainer.run_dir=runs/r", "data.workers=0", "~callbacks.tensorboard"],
        tmp_path,
    )  # fmt: skip
    assert done.code == 1
    last = done.err.rstrip().splitlines()[-1]
    assert last.startswith("echelon: batch=12, micro_batch=12: out of memory; peak ") and "micro_batch=" in last
    assert json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["error"] == last


# With a GPU's functions, faked.


class Gpu:
    """Notes the calls to torch.cuda; 80 GiB, of which another process holds 20."""

    def __init__(self, monkeypatch, allocated: int = 50, reserved: int = 55) -> None:
        self.calls: list[Any] = []
        self.stats = {"num_alloc_retries": 0, "num_device_free": 0}
        self.stats |= {"reserved_bytes.all.peak": reserved * GIB, "allocated_bytes.all.peak": allocated * GIB}
        cuda, memory = torch.cuda, torch.cuda.memory
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: self.calls.append("reset"))
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: allocated * GIB)
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: reserved * GIB)
        monkeypatch.setattr(cuda, "memory_stats", lambda device: self.stats)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: ((80 - 20 - reserved) * GIB, 80 * GIB))
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
        monkeypatch.setattr(
            memory, "set_per_process_memory_fraction", lambda share, device: self.calls.append(("share", share))
        )
        monkeypatch.setattr(
            memory, "_record_memory_history",
            lambda enabled="all", **options: self.calls.append(("record", enabled, options)),
        )  # fmt: skip
        monkeypatch.setattr(memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(allocator, "set_up", lambda wanted, device: self.calls.append(("set", wanted)) or "before")
        monkeypatch.setattr(allocator, "write_settings", lambda text: self.calls.append(("write", text)))

    def dump(self, name: str) -> None:
        self.calls.append(("dump", name))


def fake_trainer(run_dir: Path) -> Any:
    module = Toy().model()
    parameters = list(module.parameters())
    return SimpleNamespace(
        device=torch.device("cuda", 0), run_dir=run_dir, rank=1, world=1, step=7, metrics={"train/loss": 1.0},
        gathered=[], module=module, parameters=parameters,
        optimizer=adamw(module.parameters()), new_optimizer=lambda probe: adamw(probe.parameters()), recipe=Toy(),
        strategy=SimpleNamespace(bucket_bytes=5000, owned=None, data_world=1),
        plan=SimpleNamespace(micro=16, order=0, accumulate=1, features=set), precision=SimpleNamespace(name="bf16"),
        callbacks={}, undo=ExitStack(), batch=16, ranks=SimpleNamespace(place=Place()),
    )  # fmt: skip


ALL = {"max_share": 0.75, "expandable_segments": True, "max_split_mib": 64, "snapshot": True}


def test_a_gpu_is_set_up_before_the_model_is_built_and_put_back_at_the_end(monkeypatch, tmp_path):
    gpu, memory, trainer = Gpu(monkeypatch), Memory(**ALL), fake_trainer(tmp_path)
    built = memory.build_model(trainer, lambda: gpu.calls.append("build") or nn.Linear(1, 1))
    assert isinstance(built, nn.Linear)
    assert gpu.calls == [
        "reset",
        ("set", {"expandable_segments": "True", "max_split_size_mb": "64"}),
        ("share", 0.75),
        ("record", "all", {"max_entries": 100_000, "stacks": "python"}),
        "build",
    ]
    gpu.calls.clear()
    trainer.undo.close()
    assert gpu.calls == [("record", None, {}), ("share", 1.0), ("write", "before")]


def test_settings_are_put_back_if_the_run_is_refused(monkeypatch):
    done: list[str] = []

    class Sets(Callback):
        role = Role.MEASURE

        def build_model(self, trainer, build: Callable[[], nn.Module]) -> nn.Module:
            trainer.undo.callback(done.append, "undone")
            return build()

    with refuses("optimizer.lr=-1.0"):
        make_with(Sets(), lambda groups: adamw(groups, lr=-1.0))
    assert done == ["undone"]
    trainer = make_with(Sets(), adamw)
    assert done == ["undone"]
    trainer.fit()
    assert done == ["undone"] * 2


def make_with(callback: Callback, optimizer: Any) -> Trainer:
    options = Options(max_steps=1)
    return Trainer(Toy(), {"sets": callback}, optimizer, batch=12, data=DataOptions(workers=0), options=options)


def test_without_knobs_a_gpu_is_left_alone(monkeypatch, tmp_path):
    gpu, memory, trainer = Gpu(monkeypatch), Memory(), fake_trainer(tmp_path)
    memory.build_model(trainer, nn.Identity)
    trainer.undo.close()
    assert gpu.calls == ["reset"]


def test_the_peak_of_a_gpu_is_of_tensors(monkeypatch, tmp_path, messages):
    gpu, memory, trainer = Gpu(monkeypatch), Memory(), fake_trainer(tmp_path)
    memory.on_fit_start(trainer)
    memory.on_step_end(trainer)
    [(own, combine)] = trainer.gathered
    assert own() == 50.0 and combine([own()]) == {"perf/peak_memory_gib": 50.0} and messages == []
    gpu.stats |= {"num_alloc_retries": 2}
    trainer.metrics = {"train/loss": 1.0}
    memory.on_step_end(trainer)
    assert len(messages) == 1 and messages[0].startswith("step 7: the GPU was full 2 time(s)")


def failed(memory: Memory, trainer: Any, error: Exception) -> Any:
    try:
        raise error
    except Exception as caught:
        memory.on_error(trainer, caught)
        memory.on_fit_end(trainer)
        return caught


def test_on_a_gpu_the_advice_names_what_keeps_memory_from_tensors(monkeypatch, tmp_path):
    Gpu(monkeypatch, allocated=30, reserved=50)
    trainer = fake_trainer(tmp_path)
    error = failed(Memory(max_share=0.75), trainer, torch.OutOfMemoryError("Tried to allocate 20.00 MiB"))
    assert error.advice.startswith(
        "peak 30.00 of 60.00 GiB (weights 0.00, gradients 0.00, optimizer, to come 0.00, activations and the rest "
        "30.00); try callbacks.memory.max_share=0.75 (20.00 GiB more), callbacks.memory.expandable_segments=true (up "
        "to 20.00 GiB, fragmented), a GPU of its own (20.00 GiB are other processes'); micro_batch=8, with"
    )
    assert "snapshot" not in error.advice
    grows = failed(Memory(expandable_segments=True), trainer, torch.OutOfMemoryError())
    assert "expandable_segments" not in grows.advice and "max_share" not in grows.advice


def test_a_snapshot_is_written_for_the_error_that_ends_the_run(monkeypatch, tmp_path):
    gpu, trainer, file = Gpu(monkeypatch), fake_trainer(tmp_path), str(tmp_path / "logs" / "memory-rank1.pickle")
    error = failed(Memory(snapshot=True), trainer, torch.OutOfMemoryError())
    assert gpu.calls == [("dump", file)]
    assert error.advice.endswith(f"; snapshot for pytorch.org/memory_viz: {file}")
    gpu.calls.clear()
    failed(Memory(snapshot=True), trainer, ValueError())
    failed(Memory(), trainer, torch.OutOfMemoryError())
    Memory(snapshot=True).on_fit_end(trainer)
    assert gpu.calls == []


def test_a_snapshot_that_can_not_be_written_hides_nothing(monkeypatch, tmp_path, messages):
    gpu, memory, trainer = Gpu(monkeypatch), Memory(snapshot=True), fake_trainer(tmp_path)
    memory.build_model(trainer, nn.Identity)

    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    assert failed(memory, trainer, torch.OutOfMemoryError()).advice
    trainer.undo.close()
    assert "No space left on device" in messages[-1] and gpu.calls[-1] == ("record", None, {})


class Probing(Callback):
    """As `auto_batch`: catches what runs out of memory."""

    role = Role.BATCH

    def rehearse(self, trainer, run_pass, batch) -> None:
        for _ in range(2):
            try:
                run_pass(batch)
            except torch.OutOfMemoryError:
                self.caught = True


def test_an_error_that_another_callback_has_caught_leaves_nothing_behind(monkeypatch, messages):
    dumped: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped.append)
    probing = Probing()
    make(Full(2, torch.OutOfMemoryError()), memory=Memory(snapshot=True), probing=probing).fit()
    assert probing.caught and dumped == []
