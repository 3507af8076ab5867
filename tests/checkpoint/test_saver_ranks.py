"""Each rank writes its own file beside training: none holds up another, and a checkpoint has the files of all."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.checkpoint import commit, locate, manifest
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


def steps() -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in locate.checkpoints(Path("ckpt/r"))]


class Ranked(Callback):
    """Each rank keeps something of its own; one does something at a step."""

    def __init__(self, rank: int = -1, step: int = 0, call: Callable[[Trainer], Any] = lambda trainer: None) -> None:
        self.at, self.call = (rank, step), call
        self.kept = torch.zeros(2000)

    def on_step_end(self, trainer: Any) -> None:
        self.kept += trainer.step * (1 + trainer.rank)
        if self.at == (trainer.rank, trainer.step):
            self.call(trainer)

    def rank_state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "sum": self.kept.sum().item()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def ranked(place: Place, callback: Ranked, max_steps: int = 6, resume: str | None = None, **checkpoint: Any) -> Any:
    options = CheckpointOptions(**{"every_steps": 2, "keep": 9} | checkpoint)
    trainer = Trainer(
        Toy(), {"own": callback}, batch=12, place=place,
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        options=Options(max_steps=max_steps, run_dir="runs/r", checkpoint=options, resume=resume, timeout_s=20),
    )  # fmt: skip
    trainer.fit()
    return callback.kept.tolist()[0], sorted(trainer.saver.failed)


def writes_as_it_trains(place: Place) -> tuple[set[str], Any]:
    """The files that this rank has opened to write, of all checkpoints."""
    written, real = set[str](), manifest.write_files

    def write(folder: Path, files: dict[str, memoryview], moved: Any) -> Any:
        written.update(files)
        return real(folder, files, moved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_files", write)
        return written, ranked(place, Ranked())


def test_each_rank_writes_its_own_file_and_takes_it_back():
    made = run_ranks(3, writes_as_it_trains)
    common = {"model.safetensors", "optimizer.safetensors", "state.json"}
    for rank, (written, kept) in enumerate(made):
        own = {f"rank-{rank:05d}.{end}" for end in ("safetensors", "json")}
        assert written == own | (common if rank == 0 else set())
        assert kept == (21.0 * (1 + rank), [])
    assert steps() == [2, 4, 6]
    for checkpoint in Path("ckpt/r").glob("step-*"):
        files = manifest.verify(checkpoint)["files"]
        assert len(files) == 9 and "rank-" not in (checkpoint / "state.json").read_text()
    assert [kept for kept, _ in run_ranks(3, goes_on)] == [36.0, 72.0, 108.0]


def goes_on(place: Place) -> Any:
    return ranked(place, Ranked(), 8, "auto")


def full_disk(place: Place) -> Any:
    """Of rank 2 alone, at step 4."""
    real = commit.stage

    def stage(run_dir: Path, step: int, *args: Any) -> Any:
        if place.rank == 2 and step == 4:
            raise OSError(28, "No space left on device")
        return real(run_dir, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "stage", stage)
        return ranked(place, Ranked())


def test_a_rank_whose_disk_is_full_makes_no_checkpoint_of_any():
    assert [failed for _, failed in run_ranks(3, full_disk)] == [[4], [], []]
    assert steps() == [2, 6] and not list(Path("ckpt/r").glob(".tmp-*"))
    said = Path("runs/r/logs/rank0.log").read_text()
    assert "checkpoint of step 4 failed, training continues: rank 2: [Errno 28] No space left on device" in said


def test_a_rank_that_dies_in_its_file_leaves_the_older_checkpoints_whole():
    run_ranks(3, goes_on_from_nothing)
    before = steps()
    with pytest.raises(AssertionError, match="died"):
        run_ranks(3, dies)
    assert steps() == before == [2]
    assert manifest.verify(Path("ckpt/r/step-00000002"))
    assert [kept for kept, _ in run_ranks(3, goes_on)] == [36.0, 72.0, 108.0]
    assert not list(Path("ckpt/r").glob(".tmp-*"))


def goes_on_from_nothing(place: Place) -> Any:
    return ranked(place, Ranked(), 2)


def dies(place: Place) -> Any:
    """Rank 1, in the middle of its file of step 4."""
    with pytest.MonkeyPatch.context() as patch:
        real = os.write

        def write(file: int, content: Any) -> int:
            if "-00000004-" in os.readlink(f"/proc/self/fd/{file}"):
                real(file, content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(file, content)

        if place.rank == 1:
            patch.setattr(os, "write", write)
        return ranked(place, Ranked(), 8, "auto")


def on_a_disk_of_its_own(place: Place) -> str:
    if place.rank == 2:
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "VISIBLE_S", 0.2)
        try:
            ranked(place, Ranked())
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_that_do_not_see_the_same_disk_are_refused_by_number():
    for told in run_ranks(3, on_a_disk_of_its_own):
        assert told.startswith("trainer.checkpoint.dir=ckpt: rank 2 does not see rank 0's ckpt/r, into which each rank")
    assert steps() == []


def slow(place: Place) -> Any:
    """Rank 1 takes longer for its file than three steps."""
    real = commit.stage

    def stage(run_dir: Path, step: int, *args: Any) -> Any:
        if place.rank == 1 and step == 2:
            time.sleep(3.0)
        return real(run_dir, step, *args)

    seen: list[tuple[int, list[int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "stage", stage)
        callback = Ranked(0, 4, lambda trainer: seen.append((trainer.step, steps())))
        return ranked(place, callback, when_busy="skip"), seen


def test_training_goes_on_while_a_rank_writes_its_file():
    made = run_ranks(3, slow)
    assert made[0][1] == [(4, [])]
    assert [kept for kept, _ in made] == [(21.0, []), (42.0, []), (63.0, [])]
    assert steps() == [2, 6]
