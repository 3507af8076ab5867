"""Checkpoints of rows: each rank writes its own, and any other layout goes on from them; and the second level."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from support.messages import refuses
from support.ranks import run_ranks
from support.runs import sgd
from support.sharded import Case, adam, fit, flat
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard import stage3
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.parts import open_parts, read_all
from trainer.checkpoint.pretrained import load_weights
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

STEPS, HALF = 6, 3
AT = f"step-{HALF:08d}"


def case(name: str, shard: Shard | None, resume: str | None = None, **knobs: Any) -> Case:
    callbacks: dict[str, Callback] = {"ema": EMA(0.5), **({"shard": shard} if shard else {})}
    options = {"resume": resume and f"ckpt/{resume}/{AT}", "validate_every": 2, **knobs.pop("options", {})}
    return Case(callbacks, options, Toy(width=17, depth=2), steps=STEPS, run=name, **knobs)


def differences(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert not {"refused"} & {*one, *other}, (one, other)
    return max(float(np.abs(one[key] - other[key]).max()) for key in ("weights", "validated"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_resume_on_as_many_ranks_has_the_same_bits():
    """With AdamW, an average, clipping, accumulation and validations on both sides of the checkpoint."""
    straight, again = (
        run_ranks(3, fit, [case("a", Shard(3), optimizer=adam), case("h", Shard(3, reshard=False), optimizer=adam)]),
        run_ranks(3, fit, [case("b", Shard(3), "a", optimizer=adam), case("i", Shard(3), "h", optimizer=adam)]),
    )
    for ours, theirs in zip(straight, again, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert differences(one, other) == 0 and one["validation"] == other["validation"]
            assert one["losses"][HALF:] == other["losses"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_any_layout_goes_on_from_any_other():
    """To rounding, since sums have another order; with SGD, which does not amplify that as Adam does."""
    plain, sharded = run_ranks(3, fit, [case("plain", None), case("rows", Shard(3))])[0]
    assert differences(plain, sharded) < 1e-6
    for world, moves in {
        3: [("rows", None), ("plain", Shard(3)), ("rows", Shard(3, offload=True))],
        4: [("rows", Shard(3, hybrid=2)), ("rows", Shard(3))],
        1: [("rows", None)],
    }.items():
        runs = [case(f"{start}-{world}-{i}", shard, start) for i, (start, shard) in enumerate(moves)]
        for rank in run_ranks(world, fit, runs):
            for run, found in zip(runs, rank, strict=True):
                assert differences(found, plain) < 1e-6, run.run


def test_each_rank_writes_its_rows_alone():
    run_ranks(3, fit, [case("rows", Shard(3), optimizer=adam)])
    folder = Path(f"ckpt/rows/{AT}")
    names = {path.name for path in folder.glob("*.safetensors")}
    assert names == {f"part-0000{rank}.safetensors" for rank in range(3)}
    sizes = [(folder / name).stat().st_size for name in sorted(names)]
    whole = 4 * sum(p.numel() for p in Toy(width=17, depth=2).model().parameters()) * 4  # weights, average, moments
    assert sum(sizes) < whole + 3 * 8000 and max(sizes) < 0.4 * whole + 8000
    with safe_open(folder / "part-00002.safetensors", "pt") as file:
        assert file.get_slice("model/blocks.0.0.weight").get_shape() == [5, 17]  # 17 rows are 6, 6 and 5
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    weights = read_all(open_parts(folder, manifest["files"], 3)["model"])
    assert {name: tuple(p.shape) for name, p in weights.items()} == {
        name: tuple(p.shape) for name, p in Toy(width=17, depth=2).model().state_dict().items()
    }


@pytest.mark.slow
def test_weights_alone_are_taken_from_rows_and_into_rows():
    """The weights, not their average, which the checkpoint has beside them."""
    trained = run_ranks(3, fit, [case("rows", Shard(3), optimizer=adam)])[0][0]
    folder = Path(f"ckpt/rows/step-{STEPS:08d}")
    model = Toy(width=17, depth=2).model()
    load_weights(model, str(folder))
    np.testing.assert_array_equal(flat(model), trained["weights"])
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    average = read_all(open_parts(folder, manifest["files"], 3)["callbacks"]["ema"])
    model.load_state_dict(average)
    np.testing.assert_array_equal(flat(model), trained["validated"])
    assert np.abs(trained["weights"] - trained["validated"]).max() > 1e-3
    runs = [case(name, shard, options={"init_from": str(folder)}) for name, shard in (("x", None), ("y", Shard(3)))]
    one, other = run_ranks(3, fit, runs)[0]
    assert differences(one, other) < 1e-6
    assert np.abs(one["weights"] - trained["weights"]).max() < 0.2  # SGD has moved them since


def leg(place: Place, callback: Callback | None, run: str, steps: int, resume: str | None) -> None:
    Trainer(
        Toy(width=17, depth=4), {"own": deepcopy(callback)} if callback else {}, sgd, batch=24, accumulate=2,
        data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{run}"),
        options=Options(
            max_steps=steps, run_dir=f"runs/{run}", resume=resume, clip_norm=0.3, timeout_s=30.0,
            checkpoint=CheckpointOptions(every_steps=None),
        ),
    ).fit()  # fmt: skip


def saved(run: str, steps: int) -> np.ndarray:
    model = Toy(width=17, depth=4).model()
    load_weights(model, f"ckpt/{run}/step-{steps:08d}")
    return flat(model)


def test_a_run_goes_on_from_layout_to_layout():
    """Each but stage 3 has the bits of a plain run from the same checkpoint, and stage 3 DDP's to rounding."""
    resume: str | None = None
    before = None
    for steps, (world, own, plain) in enumerate(
        [(4, Shard(3), 4), (3, Shard(2), 3), (1, None, 1), (2, PipelineParallel(stages=2), 1)], start=2
    ):
        run_ranks(world, leg, own, f"own-{steps}", steps, resume)
        run_ranks(plain, leg, None, f"plain-{steps}", steps, resume)
        found, expected = saved(f"own-{steps}", steps), saved(f"plain-{steps}", steps)
        if before is None:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected)
            assert np.abs(found - before).max() > 1e-4
        before, resume = found, f"ckpt/own-{steps}"


def between(codec: str, level: Callback, **knobs: Any) -> dict[str, Callback]:
    return {"level": level, "grad_compress": GradCompress(codec, level="inter", **knobs)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_codec_between_groups_of_rows():
    """bf16 rounds element by element, so it gives what it gives to whole buckets; topk resumes with its residuals."""
    plain, there, here, topk = run_ranks(
        4,
        fit,
        [
            Case(run="plain", steps=STEPS),
            Case(between("bf16", Hierarchical(2)), run="there", steps=STEPS),
            Case(between("bf16", Shard(3, hybrid=2)), run="here", steps=STEPS),
            Case(between("topk", Shard(3, hybrid=2), density=0.3), run="topk", steps=STEPS),
        ],
    )[0]
    assert differences(there, here) < 0.3 * differences(there, plain) and differences(here, plain) > 1e-6
    assert 1e-4 < differences(topk, plain) < 0.2 and topk["left"] == 0
    two_nodes = between("topk", Shard(3, hybrid=True), density=0.3)
    resumed = Case(two_nodes, {"resume": f"ckpt/topk/{AT}"}, run="again", steps=STEPS)
    for found in run_ranks(4, fit_on_two_nodes, [resumed, Case(two_nodes, run="nodes", steps=STEPS)])[0]:
        assert differences(found, topk) == 0 and found["left"] == 0


def fit_on_two_nodes(place: Place, cases: list[Case]) -> list[dict[str, Any]]:
    return fit(replace(place, local_rank=place.rank % 2, local_world=2), cases)


class Flip(Callback):
    """Changes a weight on one rank, as broken memory would."""

    def on_step_end(self, trainer) -> None:
        if trainer.step == 2 and trainer.rank == 3:
            with torch.no_grad():
                trainer.parameters[0].to_local()[0, 0] += 1.0


def test_replicas_of_rows_are_compared():
    found = run_ranks(4, fit, [Case({"shard": Shard(3, hybrid=2), "a_flip": Flip()})])
    assert all("NumericsError: trainer.check_replicas_every=1: after step" in each["refused"] for (each,) in found)
    assert all("first.weight first" in each["refused"] for (each,) in found)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"grad_compress": GradCompress()}, "use callbacks.shard.hybrid with callbacks.grad_compress.level=inter"),
        ({"hierarchical": Hierarchical()}, "use callbacks.shard.hybrid for two levels"),
        ({"overlap": Overlap()}, "as soon as they are summed"),
        ({"onebit_adam": OneBitAdam()}, "as soon as they are summed"),
        ({"local_sgd": LocalSGD()}, "as soon as they are summed"),
        ({"bucket": Bucket()}, "both decide how parameters and gradients are laid out"),
    ],
)
@pytest.mark.parametrize("hybrid", [False, 2])
def test_what_cannot_run_with_rows_is_refused_by_name(other, words, hybrid):
    (name,) = other
    with pytest.raises(ConfigError) as refusal:
        arrange({"shard": Shard(3, hybrid=hybrid), **other}, set())
    assert words in str(refusal.value) and {"shard", name} <= set(str(refusal.value).split())


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_settings_of_ddp_are_refused(setting):
    with pytest.raises(ConfigError, match=f"shard and {setting} can't run together: .*trainer.ddp.{setting}="):
        arrange({"shard": Shard(3)}, {setting})
    with refuses("shard and fp16 can't run together", "trainer.precision=bf16"):
        arrange({"shard": Shard(3, offload=True)}, {"fp16"})


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_gradient_is_refused(register):
    model, trainer, group = Toy().model(), SimpleNamespace(recipe=Toy()), SimpleNamespace()
    name, weight = next(model.named_parameters())
    getattr(weight, register)(lambda *_: None)
    with pytest.raises(ConfigError, match=rf"^callbacks\.shard\.stage=3: {name} has a hook .*; set callbacks.shard.st"):
        stage3.fully_shard(trainer, model, group, None, None)  # pyright: ignore[reportArgumentType] parts of them


def test_offload_on_a_cpu_is_told(monkeypatch, caplog):
    monkeypatch.setattr(stage3, "FSDP", lambda *_, **__: SimpleNamespace(buckets=list))
    trainer: Any = SimpleNamespace(recipe=Toy(), callbacks={}, device=torch.device("cpu"), world=3, step=0)
    group: Any = SimpleNamespace(size=lambda: 3)
    for offload in (True, False):
        stage3.fully_shard(trainer, Toy().model(), group, None, None, reshard=True, offload=offload)
    assert caplog.text.count("offload=true frees nothing on the CPU, whose memory is the host's") == 1


class MoreGroups(Callback):
    """Groups that the next Trainer of these ranks does not make, so that its own have other names."""

    def wrap_model(self, trainer, module):
        for _ in range(5):
            torch.distributed.new_group()
        return module


class Whole(Callback):
    """Gathers all rows at the end."""

    def on_fit_end(self, trainer) -> None:
        self.weights = flat(trainer.module)


def twice(place: Place) -> list[Any]:
    """DTensor's caches keep the mesh of the first Trainer, whose groups have ended, for tensors of an equal mesh."""
    found = []
    for name, more in (("a", {"more": MoreGroups()}), ("b", {})):
        trainer = Trainer(
            Toy(), {"shard": Shard(3), "whole": (whole := Whole()), **more}, adam, batch=12,
            place=replace(place, store=f"{place.store}-{name}"),
            options=Options(max_steps=2, run_dir=f"runs/{name}"), data=DataOptions(workers=0),
        )  # fmt: skip
        trainer.fit()
        found.append(whole.weights)
    return found


def test_a_second_trainer_saves_and_gathers_without_the_groups_of_the_first():
    for first, second in run_ranks(3, twice):
        np.testing.assert_array_equal(first, second)


class Skips(Toy):
    """Rank N skips block N, as LayerDrop with each rank's own draws may. Ranks call as many blocks."""

    def model(self) -> nn.Module:
        return Skipping()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"].float().repeat(1, 2)[:, :4], self.skip(dist.get_rank())).square().mean()

    def skip(self, rank: int) -> int:
        return rank


class SkipsTheSame(Skips):
    def skip(self, rank: int) -> int:
        return 1


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for block in (block for i, block in enumerate(self.blocks) if i != skipped):
            x = torch.tanh(block(x))
        return x


def skip_blocks(place: Place, recipe: type) -> str:
    options = Options(max_steps=2, validate_every=None, run_dir=f"runs/{recipe.__name__}", timeout_s=60.0)
    trainer = Trainer(recipe(), {"shard": Shard(3)}, batch=8, place=place, options=options, data=DataOptions(workers=0))
    try:
        return trainer.fit()["stopped"]
    except ConfigError as error:
        return str(error)


def test_ranks_that_call_different_blocks_are_refused_before_they_step():
    """Their collectives fit together, so rows of different blocks would be mixed without an error."""
    for line in run_ranks(2, skip_blocks, Skips):
        assert line.startswith("callbacks.shard.stage=3: ranks called different blocks in step 1")
    assert run_ranks(2, skip_blocks, SkipsTheSame) == ["max_steps"] * 2
