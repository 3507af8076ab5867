"""What a trainer saves and takes back: refusals that name the key, acceptance, and resumes that change nothing."""

import json
import os
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Points, Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.ema import EMA
from trainer.checkpoint import commit, locate, manifest, retention, serialize
from trainer.checkpoint import lock as commit_lock
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.snapshot import Snapshot
from trainer.config.options import DDPOptions
from trainer.errors import ConfigError, DataError
from trainer.loggers.metrics_file import MetricsFile
from trainer.optim.schedule import Constant, Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


WRITTEN = ("format", "step", "files", "sha256")  # into the manifest, by the commit

DIFFERENT = {
    "seed": {"seed": 7},
    "batch": {"batch": 24},
    "data": {"recipe": Toy(samples=60)},
    "callbacks": {"callbacks": {"ema": EMA()}},
    "shuffle_shards": {"shuffle_shards": 6},
    "optimizer": {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)},
}


@pytest.mark.parametrize("key", DIFFERENT)
def test_a_resume_refuses_what_differs_and_names_the_override_that_accepts_it(key):
    make().fit()
    again = {"max_steps": 6, "resume": "auto", **DIFFERENT[key]}
    with pytest.raises(ConfigError, match=rf"{key} was .*trainer.accept=\[{key}\]"):
        make(**again).fit()
    trainer = make(**again, accept=[key])
    trainer.fit()
    assert trainer.step == 6
    assert trainer.samples == 48 + 2 * trainer.batch


def test_another_recipes_checkpoint_is_named_before_its_data():
    first = make()
    first.command.settings["recipe._target_"] = "mine.Other"
    first.fit()
    with refuses("trainer.resume", "checkpoint", "written", "recipe", "ther", "trainer.resume=null"):
        make(Toy(samples=60), resume="auto")


def test_another_model_cannot_be_accepted():
    make().fit()
    with refuses("trainer.resume=ckpt/r/step-00000004", "trainer.master_weights"):
        make(Toy(width=24), resume="auto", max_steps=6).fit()
    with refuses("trainer.accept=[model]", "compares"):
        make(Toy(width=24), resume="auto", accept=["model"], max_steps=6).fit()


def test_all_differences_are_told_at_once():
    make().fit()
    with refuses("trainer.resume", "seed", "0", "7", "batch", "12", "24", "'trainer.accept=[seed,batch]'"):
        make(batch=24, seed=7, resume="auto")


def test_going_on_from_an_older_checkpoint_sets_the_newer_aside():
    make(max_steps=6, checkpoint={"keep": 9}).fit()
    trainer = make(max_steps=4, resume="ckpt/r/step-00000002", checkpoint={"keep": 9})
    trainer.fit()
    names = sorted(path.name for path in Path("ckpt/r").iterdir())
    assert [name for name in names if name.startswith("step")] == ["step-00000002", "step-00000004"]
    assert len([name for name in names if name.startswith(".abandoned")]) == 2
    assert Path("ckpt/last.pt").resolve().name == "step-00000004"


class Layout(Callback):
    def on_fit_end(self, trainer) -> None:
        self.buckets = trainer.strategy.buckets()


def bucketed(place: Place, max_steps: int, bucket_mib: float, unused: bool) -> list[list[int]]:
    layout, options = Layout(), DDPOptions(bucket_mib, find_unused_parameters=unused)
    make(callbacks={"layout": layout}, place=place, max_steps=max_steps, resume="auto", ddp=options).fit()
    return layout.buckets


@pytest.mark.parametrize("unused", [False, True])
def test_another_layout_of_buckets_is_told(unused):
    first = run_ranks(2, bucketed, 2, 0.0005, unused)[0]
    assert bool(first) is not unused  # DDP lays nothing out anew there
    assert run_ranks(2, bucketed, 4, 0.0005, unused)[0] == first
    log = Path("runs/r/logs/rank0.log")
    told = "DDP laid its buckets out differently, so sums may differ in their last bits"
    assert told not in log.read_text()
    assert run_ranks(2, bucketed, 6, 25.0, False)[0] != first
    assert told in log.read_text()


def with_bits_flipped(place: Place, nodes: int) -> tuple[int, str]:
    """How many files rank 1 has read to compare them, and what it was told."""
    real, read, said = manifest.sha256_of, [], ""

    def sha256(file: BinaryIO) -> str:
        read.append(file.name)
        return real(file) if place.rank == 0 else "another"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "sha256_of", sha256)
        patch.setattr(timeouts, "VISIBLE_S", 0.0)
        try:
            make(place=replace(place, local_rank=place.rank // nodes), max_steps=2, resume="auto").fit()
        except ConfigError as error:
            said = str(error)
    return len(read), said


def test_each_node_compares_what_it_reads():
    """Once: its memory or its way to the disk may flip bits that rank 0's does not."""
    make(max_steps=2).fit()
    (_, said), (read, told) = run_ranks(2, with_bits_flipped, 2)
    assert read == 1 and said == told
    assert re.search(r"rank 1 does not see rank 0's checkpoint \(\S+: its sha256 is not the manifest's\)", told)
    assert run_ranks(2, with_bits_flipped, 1)[1] == (0, "")  # on one node rank 0 has


def test_state_of_callbacks_returns_to_each_by_name():
    class Counts(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, trainer: Trainer) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    make(callbacks={"a": Counts()}).fit()
    counts = Counts()
    make(callbacks={"a": counts}, resume="auto", max_steps=7).fit()
    assert counts.steps == 7


def test_to_resume_a_finished_run_changes_nothing():
    make(callbacks={"metrics_file": MetricsFile()}, log_every_steps=1).fit()
    lines = Path("runs/r/metrics.jsonl").read_text()
    make(callbacks={"metrics_file": MetricsFile()}, log_every_steps=1, resume="auto").fit()
    assert Path("runs/r/metrics.jsonl").read_text() == lines
    assert (
        json.loads(Path("runs/r/summary.json").read_text())["val/loss"]
        == json.loads(lines.splitlines()[-1])["val/loss"]
    )


def test_a_refused_resume_changes_nothing():
    make(max_steps=6, checkpoint={"keep": 9}).fit()
    before = {str(p): p.read_bytes() for d in ("runs", "ckpt") for p in Path(d).rglob("*") if p.is_file()}
    link = os.readlink("ckpt/last.pt")
    for refused in ({"checkpoint": {"keep_best": "val/typo"}}, {"callbacks": {"early_stop": EarlyStop()}}):
        with pytest.raises(ConfigError, match=r"val/typo|validates only"):
            trainer = make(resume="ckpt/r/step-00000002", max_steps=6, accept=["callbacks"], **refused)
            trainer.command.save_config = lambda run_dir: Path("runs/r/config.yaml").write_text("another")
            trainer.fit()
    after = {str(p): p.read_bytes() for d in ("runs", "ckpt") for p in Path(d).rglob("*") if p.is_file()}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"runs/r/logs/rank0.log", "ckpt/r/.lock", "ckpt/r/ATTEMPT"}
    assert Path("ckpt/r/.lock").resolve() not in commit_lock._held  # another process may go on
    assert os.readlink("ckpt/last.pt") == link


class Damaged(Toy):
    def data(self, split: str) -> Any:
        return super().data(split) if split == "val" else Broken()


class Broken(Points):
    def __init__(self) -> None:
        super().__init__(96, torch.float32)

    def __getitem__(self, i: int) -> Any:
        raise DataError("damaged")


def test_data_that_is_refused_at_its_first_batch_changes_nothing():
    make(callbacks={"metrics_file": MetricsFile()}, max_steps=6, log_every_steps=1, checkpoint={"keep": 9}).fit()
    metrics, saved = Path("runs/r/metrics.jsonl").read_bytes(), locate.checkpoints(Path("ckpt/r"))
    resumed = make(
        Damaged(), {"metrics_file": MetricsFile()}, resume="ckpt/r/step-00000002", max_steps=6, accept=["data"],
        checkpoint={"keep": 9},
    )  # fmt: skip
    with pytest.raises(DataError, match="damaged"):
        resumed.fit()
    assert Path("runs/r/metrics.jsonl").read_bytes() == metrics
    assert locate.checkpoints(Path("ckpt/r")) == saved


def late(place: Place) -> tuple[int, int]:
    """Rank 1 is on another host, on which the checkpoints come into sight later."""
    if place.rank == 1:
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        threading.Timer(1.5, os.symlink, ("../ckpt", "ckpt")).start()
    trainer = make(resume="auto", max_steps=6, place=place)
    began = trainer.plan.manifest["step"]
    trainer.fit()
    return began, trainer.step


def test_a_rank_waits_for_a_checkpoint_that_rank_0_sees_already():
    make(max_steps=4).fit()
    assert run_ranks(3, late) == [(4, 6)] * 3


@pytest.mark.parametrize("key", ["step", "samples"])
def test_a_state_and_a_manifest_of_different_steps_are_refused(key):
    """Each is whole, and its sha256 right: of two runs, or of one with a mistake of ours."""
    make().fit()
    checkpoint = Path("ckpt/r/step-00000004")
    manifest = {name: value for name, value in verify(checkpoint).items() if name not in WRITTEN}
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "MANIFEST.json"}
    state = json.loads(files["state.json"])
    files["state.json"] = json.dumps(state | {key: state[key] - 1}).encode()
    commit.commit(Path("ckpt/r"), 4, {name: memoryview(content) for name, content in files.items()}, manifest)
    was = state[key]
    with pytest.raises(
        ConfigError, match=rf"^trainer\.resume=.*: state\.json is at {key} {was - 1}, its manifest at {was}; no run"
    ):
        make(resume="auto", max_steps=6).fit()


class Sums(Callback):
    """Keeps weights of its own on each rank, and sums them up on another number of ranks."""

    def __init__(self) -> None:
        self.own = torch.ones(3)

    def rank_state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        total = torch.zeros(3)
        for state in states:
            total += state["own"]
            del state
        return {"own": total}


def test_the_states_of_ranks_are_merged_with_one_of_them_in_memory(monkeypatch):
    make(callbacks={"first": Sums(), "second": Sums()}).fit()
    checkpoint, ranks = Path("ckpt/r/step-00000004"), 8
    own = verify(checkpoint)
    files = {name: (checkpoint / name).read_bytes() for name in own["files"] if not name.startswith("rank-")}
    for rank in range(ranks):
        section = f"rank-{rank:05d}"
        kept = {name: {"own": torch.full((3,), 10.0**rank)} for name in ("first", "second")}
        files |= {name: bytes(data) for name, data in Snapshot().take({section: kept}, f"{section}.json").items()}
    rest = {name: value for name, value in own.items() if name not in WRITTEN} | {"world": ranks}
    commit.commit(Path("ckpt/r"), 4, {name: memoryview(content) for name, content in files.items()}, rest)
    alive, real = list[weakref.ref[torch.Tensor]](), serialize._read_tensors

    def read(folder: Path, names: Any, section: str) -> dict[str, torch.Tensor]:
        tensors = real(folder, names, section)
        if section.startswith("rank-"):
            assert [ref for ref in alive if ref() is not None] == []
            alive.extend(map(weakref.ref, tensors.values()))
        return tensors

    monkeypatch.setattr(serialize, "_read_tensors", read)
    callbacks = {"first": Sums(), "second": Sums()}
    make(callbacks=callbacks, resume="auto", max_steps=6).fit()
    assert len(alive) == 2 * 2 * ranks
    assert [callback.own.tolist() for callback in callbacks.values()] == [[11111111.0] * 3] * 2


class Own(Callback):
    """Keeps something of its own on each rank, and does not say what becomes of it on others."""

    def rank_state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


def kept_by_each(place: Place) -> None:
    make(callbacks={"own": Own()}, place=place).fit()


def test_what_ranks_have_kept_and_none_can_merge_is_refused_before_a_model_is_made():
    run_ranks(3, kept_by_each)
    told = (
        r"^callbacks\.own: the checkpoint has states of 3 rank\(s\), there are 1 now, and "
        r"Own has no merge_rank_states; resume on 3 rank\(s\), define merge_rank_states, or leave own out$"
    )
    recipe = Toy()
    recipe.model = lambda: pytest.fail("a model is made")
    with pytest.raises(ConfigError, match=told):
        make(recipe, {"own": Own()}, resume="auto")
    make(resume="auto", max_steps=6).fit()


@pytest.mark.parametrize("max_steps", [4, 2])
def test_a_resume_with_nothing_to_do_rewrites_nothing(max_steps):
    """Neither the config nor the checkpoint says what no step was trained with."""
    make(validate_every=2).fit()
    files = [*Path("ckpt/r").rglob("*.*"), Path("runs/r/config.yaml")]
    Path("runs/r/config.yaml").write_text("lr: 0.05")
    before = {path: path.read_bytes() for path in files if path.is_file()}
    trainer = make(resume="auto", max_steps=max_steps, validate_every=2, clip_norm=0.5)
    trainer.command.save_config = lambda run_dir: Path("runs/r/config.yaml").write_text("lr: 0.5")
    trainer.fit()
    assert trainer.step == 4 and {path: path.read_bytes() for path in before} == before


def test_a_process_that_another_has_superseded_cuts_nothing_of_the_others(monkeypatch):
    """It was stopped before its first step, and taken for dead."""
    make(callbacks={"metrics_file": MetricsFile()}, log_every_steps=1).fit()
    lines = Path("runs/r/metrics.jsonl").read_bytes()
    trainer = make(
        callbacks={"metrics_file": MetricsFile()}, resume="ckpt/r/step-00000002", log_every_steps=1, max_steps=6
    )
    trainer.command.save_config = lambda run_dir: commit.begin(Path("ckpt/r"))
    with refuses("trainer.checkpoint.dir=ckpt", "nothing"):
        trainer.fit()
    assert Path("runs/r/metrics.jsonl").read_bytes() == lines
    failed = make(
        callbacks={"metrics_file": MetricsFile()}, resume="ckpt/r/step-00000002", log_every_steps=1, max_steps=6
    )

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(retention, "set_aside", broken)
    with pytest.raises(OSError, match="Input/output"):
        failed.fit()
    assert Path("runs/r/metrics.jsonl").read_bytes() == lines


def resumed_unevenly(place: Place, steps: int) -> int:
    trainer = make(place=place, max_steps=steps, resume="auto")
    trainer.fit()
    return trainer.step


def test_a_batch_that_ranks_do_not_divide_is_resumed_on_as_many_again():
    make(max_steps=2).fit()  # 12 samples, on 1 rank
    assert run_ranks(5, resumed_unevenly, 4) == [4] * 5
    assert run_ranks(5, resumed_unevenly, 6) == [6] * 5


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (Linear(), "resume: the learning rate goes from 0.0125 to 0.025: schedule=linear now ends at step 8"),
        (Constant(), ""),
    ],
)
def test_a_rate_that_a_later_end_moves_is_named(schedule, told):
    """The last of four steps has a quarter of the rate, and the fifth of eight has half of it."""
    make(schedule=schedule).fit()
    make(schedule=schedule, max_steps=8, resume="auto").fit()
    log = Path("runs/r/logs/rank0.log").read_text()
    assert ("the learning rate goes" in log) is bool(told) and told in log
    before = len(log)
    make(schedule=schedule, max_steps=8, resume="ckpt/r/step-00000008").close()
    assert "the learning rate" not in Path("runs/r/logs/rank0.log").read_text()[before:]


def test_settings_that_follow_from_the_ranks_are_no_warnings_of_their_own():
    make(max_steps=2).fit()
    run_ranks(2, resumed_unevenly, 4)
    lines = [line.partition(" resume: ")[2] for line in Path("runs/r/logs/rank0.log").read_text().splitlines()]
    (line,) = (line for line in lines if "in the checkpoint" in line)
    assert line.startswith("1 rank in the checkpoint, 2 now (") and "micro_batch was 12 and is 6" in line
    assert not any(line.startswith(("micro_batch", "machine.threads")) for line in lines)


ODD = {
    "seconds": "1", "best": {"metric": "val/loss", "value": "x", "step": 1}, "validation": {"a": "b"}, "step": True,
    "quarantine": {}, "callbacks": {"metrics_file": {"bytes": -5, "kept": ""}}, "model": {}, "optimizer": {},
    "scaler": [],
}  # fmt: skip


@pytest.mark.parametrize("key", ODD)
def test_a_state_of_another_kind_is_one_line(key):
    """Whole, and its sha256 right: a stranger's."""
    make(callbacks={"metrics_file": MetricsFile()}).fit()
    checkpoint = Path("ckpt/r/step-00000004")
    own = verify(checkpoint)
    files = {name: (checkpoint / name).read_bytes() for name in own["files"]}
    files["state.json"] = json.dumps({**json.loads(files["state.json"]), key: ODD[key]}).encode()
    rest = {name: value for name, value in own.items() if name not in WRITTEN}
    commit.commit(Path("ckpt/r"), 4, {name: memoryview(content) for name, content in files.items()}, rest)
    with pytest.raises(ConfigError, match=r"^trainer\.resume") as error:
        make(callbacks={"metrics_file": MetricsFile()}, resume="auto", max_steps=6).fit()
    assert "\n" not in str(error.value)
