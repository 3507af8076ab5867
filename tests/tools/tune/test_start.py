"""What tools do before they start ranks: one run is taken, several are refused, and the place is found."""

import pytest
from support.cli import ROOT
from support.messages import refuses

from trainer.tools.tune.start import find_place, one_job, stop

TOY = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy", "trainer.allow_targets=[toy_recipe]"]


@pytest.fixture(autouse=True)
def hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tool"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def test_one_run_is_taken_and_its_ranks_are_found() -> None:
    job = one_job([*TOY, "trainer.devices=3", "trainer.accelerator=cpu"], "tool")
    assert job is not None and job.recipe == "toy"
    place = find_place(job.config)
    assert (place.rank, place.world, place.local_world, place.starts) == (0, 3, 3, True)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_what_the_optimizer_leaves_out_is_told_by_one_rank(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = one_job(["recipe=gpt2_tiny", "optimizer=sgd"], "tool")
    assert job is not None and "betas" not in job.config["optimizer"]
    assert capsys.readouterr().out.count("warning: optimizer.betas=[0.9, 0.95]: the recipe's YAML sets this") == lines


def test_several_runs_are_refused() -> None:
    with refuses("-m", "gives", "2"):
        one_job([*TOY, "-m", "batch=12,24"], "tool")


def test_a_signal_is_an_exit_with_its_code() -> None:
    with pytest.raises(SystemExit) as ended:
        stop(15, None)
    assert ended.value.code == 143
