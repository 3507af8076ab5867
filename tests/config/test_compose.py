"""What a run's config is composed of, and what is told of it."""

from pathlib import Path

import pytest
from support.cli import QUICK, ROOT, run

from trainer.config.compose import Job, told_apart

TOLD = "the recipe's YAML sets this, and optimizer=sgd has"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], []),
        (["optimizer=lamb", "optimizer.lr=1e-3", "optimizer.weight_decay=0"], []),
        (["optimizer=sgd", "optimizer.lr=0.1"], [f"optimizer.weight_decay=0.02: {TOLD} 0.0"]),
        (["optimizer=sgd", "optimizer.weight_decay=0"], [f"optimizer.lr=0.003: {TOLD} 0.1"]),
        (["trainer.devices=2", "optimizer=sgd"], ["optimizer.lr=0.003: ", "optimizer.weight_decay=0.02: "]),
    ],
    ids=",".join,
)
def test_a_value_that_the_recipe_sets_for_another_optimizer_is_told(
    words: list[str], told: list[str], tmp_path: Path
) -> None:
    toy = (ROOT / "tests" / "toy" / "conf" / "recipe" / "toy.yaml").read_text()
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "own.yaml").write_text(toy + "optimizer: {lr: 3e-3, weight_decay: 0.02}\n")
    done = run(["--config-dir", "conf", "recipe=own", "trainer.max_steps=0", *QUICK, *words], tmp_path)
    assert done.code == 0, done.err
    warnings = [line for line in (done.out + done.err).splitlines() if "the recipe's YAML" in line]
    assert len(warnings) == len(told), warnings
    for line, start in zip(warnings, told, strict=True):
        assert line.startswith(f"warning: {start}") and "; give optimizer." in line


@pytest.mark.parametrize(
    ("argvs", "names"),
    [
        ([["optimizer.lr=1", "batch=8"], ["optimizer.lr=2", "batch=8"]], ["toy-lr-1", "toy-lr-2"]),
        ([["+callbacks=[ema,x]"], ["+callbacks=[]"]], ["toy-callbacks-ema-x", "toy-callbacks"]),
        ([["batch=1"], ["batch=1"]], ["toy", "toy"]),
        ([["~callbacks.progress"], ["recipe=toy"]], ["toy-progress", "toy"]),
        ([["a=../../etc/x y"], ["a=" + "y" * 999]], ["toy-a-..-..-etc-x-y", "toy-a-" + "y" * 114]),
    ],
)
def test_names_of_runs_in_a_multirun(argvs: list[list[str]], names: list[str]) -> None:
    jobs = [Job({}, "toy", argv) for argv in argvs]
    assert [told_apart(job, jobs) for job in jobs] == names
