"""A single process: its crash is on the disk, its machine in what a resume compares."""

import json

from support.cli import lines, toy

PROBE = ["+callbacks=[probe]", "trainer.run_dir=runs/r", "callbacks.probe.step=3"]


def test_a_crash_is_in_the_log_and_in_the_summary_and_a_resume_goes_on(tmp_path):
    crashed = toy([*PROBE, "callbacks.probe.trouble=raise"], tmp_path)
    assert crashed.code == 1 and crashed.err.count("Traceback") == 1
    log = (tmp_path / "runs/r/logs/rank0.log").read_text()
    assert " ERROR Traceback" in log and log.endswith("RuntimeError: trouble at step 3\n")
    summary = json.loads((tmp_path / "runs/r/summary.json").read_text())
    assert (summary["stopped"], summary["error"]) == ("error", "RuntimeError: trouble at step 3")

    again = toy([*PROBE, "callbacks.probe.trouble=", "trainer.resume=auto", "trainer.max_steps=6"], tmp_path)
    assert again.code == 0, again.err  # though the crash came before a checkpoint
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["stopped"] == "max_steps"
    assert [line["step"] for line in lines(tmp_path / "runs/r")][-1] == 6


def test_other_threads_are_told_by_a_resume(tmp_path):
    assert toy(["trainer.run_dir=runs/r", "trainer.max_steps=2"], tmp_path).code == 0
    more = ["trainer.run_dir=runs/r", "trainer.max_steps=4", "trainer.resume=auto"]
    resumed = toy(more, tmp_path, OMP_NUM_THREADS="2")
    assert resumed.code == 0 and "resume: machine.threads was 1 and is 2\n" in resumed.out, resumed.err + resumed.out
