"""What a trainer saves and takes back: refusals that name the key, acceptance, retention, the best, other weights."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.ema import EMA
from trainer.checkpoint import commit, locate, manifest, retention
from trainer.checkpoint import lock as commit_lock
from trainer.checkpoint.manifest import verify
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.monitors.metrics_file import MetricsFile
from trainer.process.environment import Place
from trainer.trainer import Trainer


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def make(
    recipe: Any = None,
    callbacks: Any = None,
    optimizer: Any = sgd,
    batch: int = 12,
    lanes: int = 5,
    place: Place | None = None,
    **options: Any,
):
    checkpoint = CheckpointOptions(**{"every_steps": 2, **options.pop("checkpoint", {})})
    return Trainer(
        recipe or Toy(),
        callbacks or {},
        optimizer,
        batch=batch,
        options=Options(**{"max_steps": 4, "run_dir": "runs/r", "checkpoint": checkpoint, **options}),
        data=DataOptions(workers=0, lanes=lanes, block=4),
        place=place or Place(),
    )


WRITTEN = ("format", "step", "files", "sha256")  # into the manifest, by the commit

DIFFERENT = {
    "seed": {"seed": 7},
    "batch": {"batch": 24},
    "data": {"recipe": Toy(samples=60)},
    "callbacks": {"callbacks": {"ema": EMA()}},
    "lanes": {"lanes": 6},
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


def test_another_model_cannot_be_accepted():
    make().fit()
    with pytest.raises(ConfigError, match="another model"):
        make(Toy(width=24), resume="auto", max_steps=6).fit()
    with pytest.raises(ConfigError, match=r"trainer.accept=\[model\]: is nothing that a resume compares"):
        make(Toy(width=24), resume="auto", accept=["model"], max_steps=6).fit()


def test_all_differences_are_told_at_once():
    make().fit()
    with pytest.raises(
        ConfigError, match=r"seed was 0 .* and is 7; batch was 12 .* and is 24.*trainer.accept=\[seed,batch\]"
    ):
        make(batch=24, seed=7, resume="auto")


def test_the_newest_and_the_best_are_kept():
    # The first is not validation yet: it tells the names of the metrics.
    losses = iter([0.0, 3.0, 1.0, 2.0, 4.0, 5.0])

    class Scripted(Toy):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
            return {"loss": (torch.tensor(self.value), 1)}

        def data(self, split: str) -> Any:
            if split == "train":
                return super().data(split)
            return Script(self)

    class Script:
        def __init__(self, recipe: Any) -> None:
            self.recipe = recipe

        def __iter__(self):
            self.recipe.value = next(losses)
            yield {"x": torch.zeros(1)}

    recipe = Scripted()
    recipe.weight = lambda batch: len(batch["x"])  # pyright: ignore
    make(recipe, max_steps=10, validate_every=2, checkpoint={"keep": 2, "keep_best": "val/loss"}).fit()
    kept = [int(path.name.split("-")[1]) for path in locate.checkpoints(Path("ckpt/r"))]
    assert kept == [4, 8, 10]
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert summary["best"] == {"metric": "val/loss", "value": 1.0, "step": 4}


class Scored(Toy):
    """The validation that the test says."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        return {name: (torch.tensor(value), 1) for name, value in self.scores.items()}

    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else [{"mask": torch.ones(1)}]


def test_the_best_of_one_metric_is_not_compared_with_anothers():
    recipe = Scored()
    expected = {"val/loss": 0.5, "max val/right": 0.25, "val/right": 0.75}
    for n, (keep_best, value) in enumerate(expected.items(), start=1):
        recipe.scores = {keep_best.rpartition("/")[2]: value}
        trainer = make(recipe, resume="auto", max_steps=2 * n, checkpoint={"keep_best": keep_best})
        trainer.fit()
        assert trainer.best == {"metric": keep_best, "value": value, "step": 2 * n}


def test_a_checkpoint_that_is_written_is_no_failure_where_older_ones_stay(monkeypatch, capsys):
    def fails(*args: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(retention, "retain", fails)
    make(max_steps=4).fit()
    out = capsys.readouterr().out
    assert "checkpoint of step 2 is written, but older ones can't be removed: [Errno 30] Read-only file system" in out
    assert "failed" not in out
    assert [path.name for path in locate.checkpoints(Path("ckpt/r"))] == ["step-00000002", "step-00000004"]


def test_the_last_checkpoint_that_can_not_be_written_is_one_line_after_the_summary(monkeypatch):
    real = commit.commit

    def full(run_dir: Path, step: int, *args: Any) -> Path:
        if step == 4:
            raise OSError(28, "No space left on device")
        return real(run_dir, step, *args)

    monkeypatch.setattr(commit, "commit", full)
    with pytest.raises(ConfigError) as error:
        make().fit()
    assert str(error.value) == (
        "trainer.checkpoint.dir=ckpt: the checkpoint of the last step, 4, failed: [Errno 28] No space left on device; "
        "mend that and go on from the one before by trainer.resume=ckpt/r"
    )
    assert json.loads(Path("runs/r/summary.json").read_text())["steps"] == 4
    monkeypatch.undo()


def test_a_failed_write_is_told_and_training_goes_on(monkeypatch, capsys):
    real, failures = commit.commit, iter([True, False, False])

    def fail_once(*args: Any) -> Path:
        if next(failures):
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(commit, "commit", fail_once)
    trainer = make(max_steps=6)
    trainer.fit()
    assert trainer.step == 6
    assert (
        "checkpoint of step 2 failed, training goes on: [Errno 28] No space left on device" in capsys.readouterr().out
    )
    assert [path.name for path in locate.checkpoints(Path("ckpt/r"))] == ["step-00000004", "step-00000006"]


def test_going_on_from_an_older_checkpoint_sets_the_newer_aside():
    make(max_steps=6, checkpoint={"keep": 9}).fit()
    trainer = make(max_steps=4, resume="ckpt/r/step-00000002", checkpoint={"keep": 9})
    trainer.fit()
    names = sorted(path.name for path in Path("ckpt/r").iterdir())
    assert [name for name in names if name.startswith("step")] == ["step-00000002", "step-00000004"]
    assert len([name for name in names if name.startswith(".abandoned")]) == 2
    assert Path("ckpt/last.pt").resolve().name == "step-00000004"


def test_init_from_takes_weights_and_nothing_else():
    first = make()
    first.fit()
    second = make(run_dir="runs/s", init_from="ckpt/last.pt", max_steps=0)
    second.fit()
    assert (second.step, second.samples) == (0, 0)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    tensors = load_file("ckpt/r/step-00000004/model.safetensors")
    save_file({**tensors, "more": torch.zeros(1)}, "more.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"init_from=more.safetensors: 0 weights are missing, 1 unknown and 0 of another shape or kind \(more",
    ):
        make(run_dir="runs/t", init_from="more.safetensors").fit()
    Path("more.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"init_from=more.safetensors: .*; give a whole checkpoint"):
        make(run_dir="runs/t", init_from="more.safetensors").fit()
    with pytest.raises(ConfigError, match="init_from=nowhere: no such"):
        make(run_dir="runs/u", init_from="nowhere").fit()


def test_init_from_refuses_a_damaged_checkpoint():
    make().fit()
    file = Path("ckpt/r/step-00000004/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"init_from=ckpt/last.pt: .*its sha256 is not the manifest's; give a whole"):
        make(run_dir="runs/s", init_from="ckpt/last.pt").fit()


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
    real, read, said = manifest._sha256, [], ""

    def sha256(file: BinaryIO) -> str:
        read.append(file.name)
        return real(file) if place.rank == 0 else "another"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_sha256", sha256)
        patch.setattr(manifest, "VISIBLE_S", 0.0)
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
        with pytest.raises(ConfigError, match=r"val/typo|validates nothing"):
            trainer = make(resume="ckpt/r/step-00000002", max_steps=6, accept=["callbacks"], **refused)
            trainer.on_accepted = lambda: Path("runs/r/config.yaml").write_text("another")
            trainer.fit()
    after = {str(p): p.read_bytes() for d in ("runs", "ckpt") for p in Path(d).rglob("*") if p.is_file()}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"runs/r/logs/rank0.log", "ckpt/r/.lock", "ckpt/r/ATTEMPT"}
    assert Path("ckpt/r/.lock").resolve() not in commit_lock._held  # another process may go on
    assert os.readlink("ckpt/last.pt") == link


def test_auto_does_not_begin_anew_in_the_folder_of_a_run_that_has_ended():
    make(max_steps=4).fit()
    with pytest.raises(
        ConfigError, match=r"^trainer\.run_dir=runs/r: holds a run that has ended, and other/r has no check"
    ):
        make(max_steps=2, resume="auto", checkpoint={"dir": "other"})


def test_a_file_where_the_checkpoints_should_be_is_refused():
    Path("ckpt").mkdir()
    Path("ckpt/r").touch()
    with pytest.raises(
        ConfigError, match=r"^trainer\.checkpoint\.dir=ckpt/r: can't be written: File exists; give anoth"
    ):
        make()
    assert not Path("runs").exists()


class Killed(Callback):
    """As by SIGKILL, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            trainer.saver.close()
            raise SystemExit


@pytest.mark.parametrize("again", [{"resume": "auto"}, {"attempt": "1"}], ids=str)
def test_a_run_whose_checkpoints_are_not_there_does_not_begin_anew(again, monkeypatch):
    """A disk that is not mounted, another folder."""
    metrics = Path("runs/r/metrics.jsonl")
    with pytest.raises(SystemExit):
        make(callbacks={"metrics_file": MetricsFile(), "stops": Killed(3)}, log_every_steps=1).fit()
    lines = metrics.read_bytes()
    Path("ckpt").rename("away")
    monkeypatch.setenv("ECHELON_ATTEMPT", again.get("attempt", "0"))
    with pytest.raises(
        ConfigError,
        match=r"^trainer\.run_dir=runs/r: holds a run that has written checkpoints, and ckpt/r has no checkpoint of it"
        r"; give the trainer\.checkpoint\.dir that has, or another trainer\.run_dir$",
    ):
        make(callbacks={"metrics_file": MetricsFile()}, resume=again.get("resume"))
    assert metrics.read_bytes() == lines
    monkeypatch.setenv("ECHELON_ATTEMPT", "0")
    make(callbacks={"metrics_file": MetricsFile()}, resume="auto", checkpoint={"dir": "away"}).fit()
    assert metrics.read_bytes().startswith(lines[: lines.index(b"\n")])


def test_a_run_that_has_no_checkpoint_yet_begins_anew():
    with pytest.raises(SystemExit):
        make(callbacks={"metrics_file": MetricsFile(), "stops": Killed(1)}, log_every_steps=1).fit()
    assert Path("runs/r/metrics.jsonl").read_bytes()
    make(callbacks={"metrics_file": MetricsFile()}, resume="auto", log_every_steps=1).fit()
    assert json.loads(Path("runs/r/metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_one_process_at_a_time_writes_a_runs_folder():
    """Wherever its checkpoints are."""
    make(max_steps=1).fit()
    trainer = make(max_steps=1, run_dir="runs/s")
    code = (
        "import fcntl, os, sys; file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); "
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB); os.ftruncate(file, 0); "
        "os.pwrite(file, b'process 1 on host', 0); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run([*words, "runs/s/.lock"], capture_output=True).returncode == 1
    trainer.fit()
    files = {path: path.read_bytes() for path in Path("runs/r").rglob("*") if path.is_file() and path.name != ".lock"}
    with subprocess.Popen([*words, "runs/r/.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline()
        with pytest.raises(
            ConfigError,
            match=r"^trainer\.run_dir=runs/r: process 1 on host writes the run r; "
            r"wait for it to end, or use another trainer\.run_dir$",
        ):
            make(resume="ckpt/r", checkpoint={"dir": "other"})
        assert first.stdin
        first.stdin.close()
    assert all(path.read_bytes() == content for path, content in files.items())
    make(resume="ckpt/r", checkpoint={"dir": "other"}).fit()


def test_lines_that_are_missing_are_told_of():
    make(callbacks={"metrics_file": MetricsFile()}, max_steps=2, log_every_steps=1).fit()
    Path("runs/r/metrics.jsonl").write_text("")
    make(callbacks={"metrics_file": MetricsFile()}, max_steps=4, log_every_steps=1, resume="auto").fit()
    assert "WARNING runs/r/metrics.jsonl: lines are missing: 0 bytes" in Path("runs/r/logs/rank0.log").read_text()


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
        ConfigError, match=rf"^trainer\.resume=.*: state\.json is at {key} {was - 1}, its manifest at {was}: not"
    ):
        make(resume="auto", max_steps=6).fit()


def test_the_best_is_one_that_could_be_written(monkeypatch):
    """Of step 4's nothing is left but its number: the next that is better than all others is kept, and told."""
    recipe, losses, real = Scored(), {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}, commit.commit

    class Validates(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            recipe.scores = {"loss": losses.get(trainer.step, 0.0)}
            if trainer.saver.writing is not None:
                trainer.saver.writing.result()  # else what is known depends on the disk

    def full(run_dir: Path, step: int, *args: Any) -> Path:
        if step == 4:
            raise OSError(28, "No space left on device")
        return real(run_dir, step, *args)

    monkeypatch.setattr(commit, "commit", full)
    recipe.scores = {"loss": 0.0}
    keep = {"keep_best": "val/loss", "every_steps": None}
    trainer = make(recipe, {"validates": Validates()}, max_steps=8, validate_every=2, checkpoint=keep)
    trainer.fit()
    best = json.loads(Path("runs/r/summary.json").read_text())["best"]
    assert best == {"metric": "val/loss", "value": 2.0, "step": 6}
    kept = [int(path.name.removeprefix("step-")) for path in locate.checkpoints(Path("ckpt/r"))]
    assert kept == [6, 8]
    losses[10] = 1.5
    again = make(recipe, {"validates": Validates()}, max_steps=10, validate_every=2, checkpoint=keep, resume="auto")
    again.fit()
    assert again.best["step"] == 10


class Own(Callback):
    """Keeps something of its own on each rank, and does not say what becomes of it on others."""

    def rank_state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


def kept_by_each(place: Place) -> None:
    make(callbacks={"own": Own()}, place=place).fit()


def test_what_ranks_have_kept_and_none_can_merge_is_refused_before_a_model_is_made():
    run_ranks(3, kept_by_each)
    told = (
        r"^callbacks\.own: the checkpoint has what each of 3 rank\(s\) kept of its own, there are 1 now, and "
        r"Own has no merge_rank_states; resume on 3, give it one, or leave own out$"
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
    trainer.on_accepted = lambda: Path("runs/r/config.yaml").write_text("lr: 0.5")
    trainer.fit()
    assert trainer.step == 4 and {path: path.read_bytes() for path in before} == before


def test_a_process_that_another_has_superseded_cuts_nothing_of_the_others(monkeypatch):
    """It was stopped before its first step, and taken for dead."""
    make(callbacks={"metrics_file": MetricsFile()}, log_every_steps=1).fit()
    lines = Path("runs/r/metrics.jsonl").read_bytes()
    trainer = make(
        callbacks={"metrics_file": MetricsFile()}, resume="ckpt/r/step-00000002", log_every_steps=1, max_steps=6
    )
    trainer.on_accepted = lambda: commit.begin(Path("ckpt/r"))
    with pytest.raises(ConfigError, match="nothing is to be done"):
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
