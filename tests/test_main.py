"""What is typed and what is seen: help, multirun, names of callbacks, the run's folder, lines, resume."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.cli import PYTHONPATH, QUICK, TOY, environment, run, toy
from support.messages import refuses
from support.quick import quick
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainer
from trainer import main
from trainer.config.check import check
from trainer.config.compose import Job
from trainer.errors import ConfigError

SHORT = [
    "trainer.max_steps=4",
    "trainer.checkpoint.every_steps=2",
    "trainer.validate_every=2",
    "trainer.log_every_steps=1",
]


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> tuple[Path, str]:
    """A run with the default callbacks: its folder, and what it printed."""
    cwd = tmp_path_factory.mktemp("default")
    done = run([*TOY, *SHORT, "trainer.run_dir=runs/a", "trainer.accelerator=cpu"], cwd)
    assert done.code == 0, done.err
    assert done.err == ""
    return cwd, done.out


def test_help_lists_everything_and_imports_nothing_heavy(tmp_path):
    heavy = "{'torch', 'hydra', 'numpy', 'yaml', 'email', 'socket', 'multiprocessing', 'ctypes', 'hashlib'}"
    code = "import atexit, sys; from trainer.main import command, main\nsys.argv = ['echelon', '--help']\n"
    code += "atexit.register(lambda: command(['--version']))\n"
    code += f"atexit.register(lambda: print('loaded:', *{heavy} & set(sys.modules)))\nmain()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    version = re.escape(trainer.__version__)
    assert re.search(rf"\nloaded: *\nechelon-trainer {version} \(torch \d[^ ]*\)\n$", done.stdout)
    for name in ("bert_tiny", "bert_base", "bert_large", "ema", "overlap", "grad_compress", "adamw", "one_cycle"):
        assert re.search(rf"^  {name} +\S.{{10,}}$", done.stdout, re.MULTILINE), name
    assert "trainer.resume=ckpt/last.pt" in done.stdout
    own = run(["--config-dir", TOY[1], "--help"], tmp_path)
    assert "A small network on synthetic data" in own.out


NEEDED = {"antlr4", "hydra", "numpy", "omegaconf", "safetensors", "torch", "torchgen", "trainer", "yaml", "zlib_ng"}
BY_TORCH = {
    "attr", "attrs", "cython_runtime", "dill", "mpmath", "packaging", "pynvml", "sympy", "tqdm", "typing_extensions"
}  # fmt: skip


def test_a_run_imports_nothing_that_it_does_not_use(tmp_path):
    """What torch itself imports depends on what is installed."""
    code = "import atexit, sys; from trainer.main import main\n"
    code += "atexit.register(lambda: print('loaded:', *sys.modules, file=sys.stderr))\n"
    code += "sys.argv = ['echelon', *sys.argv[1:]]\nmain()"
    words = [*TOY, *SHORT, "trainer.accelerator=cpu", "~callbacks.tensorboard", "data.workers=0"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), cwd=tmp_path, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.rpartition("loaded: ")[2].split()
    own = {name for name in loaded if name.startswith("trainer.")}
    others = {name.partition(".")[0] for name in loaded} - {*sys.stdlib_module_names, *NEEDED, *BY_TORCH}
    assert not {name for name in others if not name.startswith(("_", "toy"))}
    assert "torch._dynamo" not in loaded and "torch.utils.tensorboard" not in loaded
    unused = "trainer.callbacks.", "trainer.comm.codecs.", "trainer.parallel.fsdp", "trainer.tools."
    assert not {name for name in own if name.startswith(unused)}
    assert 100 < len(own) <= 210, sorted(own)


def test_the_folder_of_a_run(default):
    cwd, _ = default
    folder = cwd / "runs" / "a"
    assert {path.name for path in folder.iterdir()} - {"advice.jsonl"} == {  # advice depends on the machine's load
        ".lock", ".signature", "checkpointed", "config.yaml", "events.jsonl", "logs", "metrics.jsonl",
        "step_times.jsonl", "summary.json", "tensorboard",
    }  # fmt: skip
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [list(line)[:3] for line in lines] == [["step", "samples", "seconds"]] * 6
    assert [(line["step"], "val/loss" in line) for line in lines] == [
        (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
    ]  # fmt: skip
    assert {"train/loss", "train/lr", "train/grad_norm", "perf/samples_per_s"} <= lines[0].keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val/loss"] == lines[-1]["val/loss"]
    assert summary["steps"] == 4
    assert summary["samples"] == 48
    assert summary["stopped"] == "max_steps"
    assert summary["checkpoint"] == "ckpt/a/step-00000004"
    assert summary["best"]["metric"] == "val/loss"
    assert {"seconds", "device", "versions", "precision", "ranks"} <= summary.keys()
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.max_steps == 4
    assert (folder / "logs" / "rank0.log").read_text().count("step 4/4") == 1  # the validation's line
    assert (cwd / "ckpt" / "last.pt").resolve() == (cwd / "ckpt" / "a" / "step-00000004").resolve()


def test_tensorboard_has_the_numbers_and_the_config(default):
    cwd, _ = default
    events = EventAccumulator(str(cwd / "runs" / "a" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("val/loss")] == [2, 4]
    assert b"max_steps: 4" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_lines_where_there_is_no_terminal(default):
    _, out = default
    assert re.search(r"^step 3/4  loss [\d.]+  lr [\d.e-]+  [\d,]+ samples/s  .* left$", out, re.MULTILINE)
    assert "run         runs/a\ncheckpoint  ckpt/a/step-00000004\n" in out
    assert "\x1b" not in out


def test_multirun_makes_a_run_per_value(tmp_path):
    done = toy(["-m", "optimizer.lr=1e-3,3e-3", "recipe.width=${batch}", "trainer.max_steps=2"], tmp_path)
    assert done.code == 0, done.err
    echoed = [shlex.split(line) for line in done.out.splitlines() if line.startswith("run runs/")]
    assert [words[2:] for words in echoed] == [
        [*TOY, *QUICK, f"optimizer.lr={lr}", "recipe.width=${batch}", "trainer.max_steps=2"]
        for lr in ("0.001", "0.003")
    ]
    names = [Path(words[1]).name for words in echoed]
    assert [re.sub(r"\d{8}-\d{6}$", "TIME", name) for name in names] == ["toy-lr-0.001-TIME", "toy-lr-0.003-TIME"]
    table = done.out.rpartition("finished at step")[2]
    assert re.search(r"^run +best val/loss +optimizer.lr +at step +state +steps", table, re.MULTILINE)
    rows = re.findall(r"^[12] lr-\S+ +\S+ +0.00([13]) +2 +finished +2 ", table, re.MULTILINE)
    assert sorted(rows) == ["1", "3"]
    best_first = (next(name for name in names if f"lr-0.00{digit}" in name) for digit in rows)
    assert table.endswith(f"curves: echelon report {' '.join(f'runs/{name}' for name in best_first)}\n")
    runs = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(runs) == 2
    assert sorted(OmegaConf.load(folder / "config.yaml").optimizer.lr for folder in runs) == [1e-3, 3e-3]
    assert len({json.loads((folder / "summary.json").read_text())["train/loss"] for folder in runs}) == 2
    assert len(list((tmp_path / "ckpt").glob("*/step-00000002"))) == 2


def test_a_stopped_sweep_names_the_runs_that_were_not_started_and_continues(tmp_path):
    """The first run ends before the signal, the second is stopped by it, and the third does not start."""
    probe = ["+callbacks=[probe]", "callbacks.probe.trouble=SIGINT", "callbacks.probe.step=3"]
    sweep = ["-m", *probe, "trainer.max_steps=2,9,1", "trainer.run_dir=runs/r${trainer.max_steps}"]
    stopped = toy(sweep, tmp_path)
    table = stopped.out.rpartition("resume with")[2]
    assert stopped.code == 75 and re.search("r2 .*finished", table) and "stopped by a signal" in table
    hint = "start each without -m; with 'trainer.run_dir=runs/${trainer.max_steps}' trainer.resume=auto, a sweep"
    line = f"echelon: 1 of 3 runs were not started: trainer.max_steps=1; {hint} continues when it is typed again\n"
    assert stopped.err == line
    done = toy([*sweep, "trainer.resume=auto", "callbacks.probe.trouble="], tmp_path)
    assert done.code == 0 and "runs/r2 has finished at step 2" in done.out and "not started" not in done.err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["r1", "r2", "r9"]
    assert json.loads((tmp_path / "runs" / "r9" / "summary.json").read_text())["steps"] == 9


def test_a_sweep_that_ends_at_once_has_last_words():
    same = jobs([("auto", "runs/a")] * 3)
    sweep = [job._replace(argv=["batch=8", f"optimizer.lr={n}"]) for n, job in enumerate(same)]
    rest = main.not_started(sweep, 1, "")
    assert rest.endswith("2 of 3 runs were not started: optimizer.lr=1; optimizer.lr=2; the same command continues\n")
    assert main.not_started(sweep, 3, "") == ""
    secret = [job._replace(argv=[f"+callbacks.x.token=abc{n}", "a\x1b=1"]) for n, job in enumerate(same)]
    assert "abc" not in (said := main.not_started(secret, 1, "")) and "\x1b" not in said and "token=" in said
    lines = main.last_words(sweep, 2, "").splitlines()
    assert lines[0] == "echelon: the runs that ended: echelon compare runs/a" and "optimizer.lr=2" in lines[1]


@pytest.mark.parametrize(
    "settings",
    [
        [("auto", None), ("auto", None)],
        [("auto", "runs/a"), ("auto", "runs/a")],
        [(None, None), ("ckpt/last.pt", None), ("ckpt/last.pt", None)],
    ],
)
def test_runs_of_a_multirun_that_would_resume_each_other_are_refused(settings):
    with refuses("trainer.resume", "2", "'trainer.run_dir=runs/${optimizer.lr}'"):
        main.refuse_shared(jobs(settings))
    main.refuse_shared(jobs([("auto", "runs/a"), ("auto", "runs/b"), ("ckpt/a", None), ("ckpt/b", None)]))
    main.refuse_shared(jobs([(None, None), (None, None)]))
    main.refuse_shared(jobs([("auto", None, {"dir": name}) for name in ("ckpt-1", "ckpt-2")]))


def jobs(settings: list[Any], dry_run: bool = False) -> list[Job]:
    keys = ("resume", "run_dir", "checkpoint")
    made = [dict(zip(keys, [*each, {"dir": "ckpt"}], strict=False)) for each in settings]
    return [Job({"trainer": {**each, "dry_run": dry_run}}, "toy", []) for each in made]


@pytest.mark.parametrize(
    "settings",
    [
        [(None, "runs/a"), (None, "runs/a")],
        [(None, "runs/a"), (None, "runs/../runs/a"), (None, None)],
        [(None, "runs/a", {"dir": "ckpt-1"}), (None, "runs/a", {"dir": "ckpt-2"})],
        [(None, "x/a"), (None, "y/a")],
    ],
)
def test_runs_of_a_multirun_that_would_write_into_one_folder_are_refused_before_the_first(settings):
    with refuses("trainer.run_dir", "2", "'trainer.run_dir=runs/${optimizer.lr}'"):
        main.refuse_shared(jobs(settings))
    two = [job._replace(argv=["a=1", f"optimizer.lr={n}", f"batch={n}"]) for n, job in enumerate(jobs(settings))]
    with refuses("trainer.run_dir", "'trainer.run_dir=runs/${optimizer.lr}-${batch}'"):
        main.refuse_shared(two)
    two = [job._replace(argv=[f"trainer.run_dir=runs/{n}", f"accumulate={n}"]) for n, job in enumerate(two)]
    with refuses("trainer.run_dir", "'trainer.run_dir=runs/${accumulate}'"):
        main.refuse_shared(two)
    main.refuse_shared(jobs(settings, dry_run=True))
    main.refuse_shared(jobs([(None, "runs/a"), (None, "runs/b"), (None, "x/a", {"dir": "ckpt-2"}), (None, None)]))


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("trainer.seed=glob(*)", "-m: gives no run, as glob(*) does for a key that is no group; give values, as in"),
        ("optimizer.lr=interval(0.1,0.3)", "-m: interval() is for samplers, which Echelon has none of; give values"),
    ],
)  # fmt: skip
def test_a_sweep_of_no_values_is_no_success(word, line, monkeypatch, tmp_path):
    monkeypatch.setattr(main.sys, "argv", main.sys.argv[:1])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        main.command(["-m", word])


@pytest.mark.slow
def test_each_job_is_checked_before_the_first_runs(tmp_path):
    done = toy(["recipe.width=16", "-m", "callbacks=[],[ema]", "batch=12,0"], tmp_path)  # -m may stand anywhere
    assert (done.code, done.err) == (78, "echelon: batch=0: must be at least 1\n")
    assert not (tmp_path / "runs").exists()


def test_ranks_of_a_pipeline_share_samples(monkeypatch):
    """Four ranks in four stages read one batch; without stages six samples do not divide."""
    for name in ("OMP_WAIT_POLICY", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # `run` sets those that are missing
    monkeypatch.setattr("trainer.launch.launcher.start", lambda *_: 0)
    config: dict[str, Any] = {"trainer": {"devices": 4}, "nccl": {}, "batch": 6, "micro_batch": 1, "accumulate": None}
    assert main.run({**config, "callbacks": {"pipeline": {"stages": 4}}}, "toy", []) == 0
    with refuses("batch=6", "4", "batch=4"):
        main.run({**config, "callbacks": {"ema": {"decay": 0.9}}}, "toy", [])


@pytest.mark.slow
def test_names_of_callbacks(tmp_path):
    shown = {}
    for words in (
        "callbacks=[ema]",
        "+callbacks=[ema]",
        "callbacks=[progress,ema]",
        "callbacks=ema",
        "callbacks=[tensorboard, ema]",
        "~callbacks.progress",
    ):
        done = run([*TOY, words, "--cfg", "job"], tmp_path)
        assert done.code == 0, done.err
        shown[words] = set(OmegaConf.create(done.out).callbacks)
    observers = {"progress", "tensorboard", "metrics_file", "events", "step_timer", "throughput", "memory", "advice"}
    assert shown.pop("~callbacks.progress") == observers - {"progress"}
    assert set(map(frozenset, shown.values())) == {frozenset(observers | {"ema"})}


@pytest.mark.parametrize("name", quick(["adamw8bit", "muon", "adafactor", "adagrad", "lars"], 2))
def test_an_optimizer_by_its_name(tmp_path, name):
    done = run([*TOY, f"optimizer={name}", "optimizer.lr=0.5", "--cfg", "job"], tmp_path)
    assert done.code == 0, done.err
    config: Any = OmegaConf.to_container(OmegaConf.create(done.out))
    assert name in config["optimizer"]["_target_"].lower() and config["optimizer"]["lr"] == 0.5
    check(config, ("trainer.optim", "trainer.callbacks", "trainer.monitors", "trainer.loggers"))


@pytest.mark.slow
def test_lists_of_callbacks_add_up(tmp_path):
    """As where one more is typed at the end of the command that goes on."""
    two = ["callbacks=[ema]", "+callbacks=[early_stop,ema]"]
    done = run([*TOY, *two, "callbacks.ema.decay=0.9", "--cfg", "job"], tmp_path)
    assert done.code == 0, done.err
    shown = OmegaConf.create(done.out).callbacks
    assert {"ema", "early_stop", "progress"} <= set(shown) and shown.ema.decay == 0.9
    sweep = ["-m", "+callbacks=[],[probe]", "+callbacks=[ema]", "trainer.max_steps=1"]
    done = toy(sweep, tmp_path)
    assert done.code == 0, done.err
    orders = re.findall("^callbacks, in order: (.*)$", done.out, re.MULTILINE)
    assert [("ema" in order, "probe" in order) for order in orders] == [(True, False), (True, True)]


def test_resume_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path):
    words = [*SHORT, "trainer.run_dir=runs/r", "trainer.resume=auto", "trainer.clip_norm=inf"]
    assert "resumed" not in toy(words, tmp_path).out
    file = tmp_path / "ckpt/r/step-00000004/MANIFEST.json"
    content = {key: value for key, value in json.loads(file.read_text()).items() if key != "sha256"}
    content["versions"]["torch"] = content["settings"]["optimizer._target_"] = "1.0\x1b[2J\n"  # nothing that is obeyed
    content["sha256"] = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    file.write_text(json.dumps(content, indent=1))
    changed = ["trainer.precision=bf16", "optimizer.lr=0.002", "data.workers=1"]
    done = toy([*words, *changed, "trainer.max_steps=6"], tmp_path)
    told = re.findall(r"^warning: resume: (.* was .* and is .*)$", done.out, re.MULTILINE)
    assert told == [
        r"optimizer._target_ was 1.0\u001b[2J\n and is trainer.optim.factories.adamw",
        "optimizer.lr was 0.001 and is 0.002",
        "trainer.max_steps was 4 and is 6",
        "trainer.precision was fp32 and is bf16",
        rf"torch was 1.0\u001b[2J\n and is {torch.__version__}",
    ]
    assert "resumed from ckpt/r/step-00000004 at step 4, sample 48" in done.out
    assert "the learning rate goes" not in done.out  # because of `optimizer.lr`, too
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["steps"] == 6


def test_a_finished_run_whose_export_is_missing_has_its_numbers_still(default):
    """A resume makes no step, and says what the run's last step was."""
    cwd, _ = default
    file = cwd / "runs" / "a" / "summary.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | {"export": None}))
    again = run([*TOY, *SHORT, "trainer.accelerator=cpu", "trainer.resume=ckpt/a"], cwd)
    assert again.code == 0, again.err
    after = json.loads(file.read_text())
    volatile = ("seconds", "checkpoint")
    assert {k: v for k, v in after.items() if k not in volatile} == {
        k: v for k, v in before.items() if k not in volatile
    }
    numbers = re.split(r"finished at step \d+ after \S+ s\n", again.out)[1].partition("run    ")[0]
    train, perf, times, val = numbers.splitlines()
    assert re.fullmatch(r"train       loss 0\.\d{1,6}  lr 0\.0005  grad_norm \S+", train)
    assert re.fullmatch(r"perf        peak_rss_gib \d\.\d+  samples_per_s \d{0,2},?[\d.]{1,5}", perf)
    assert re.fullmatch(r"time        [\d.]+ ms a step(  ?\w+ \d+%,?)+", times)
    assert re.fullmatch(r"val         loss 0\.\d{1,6}", val)
    summary = file.read_bytes()
    ended = "nothing to do: runs/a has finished at step 4, and stays as it is"
    told = f"{ended}; a trainer.max_steps above 4 would resume it\n"
    done = run([*TOY, *SHORT, "trainer.accelerator=cpu", "trainer.resume=ckpt/a"], cwd)
    assert (done.code, done.out, done.err) == (0, told, "") and file.read_bytes() == summary


def test_weights_alone_from_another_run(default, tmp_path):
    """The first numbers are those that the other run's weights give, and everything else begins anew."""
    cwd, _ = default
    words = ["trainer.max_steps=0", f"trainer.init_from={cwd}/ckpt/last.pt", "trainer.run_dir=runs/r"]
    done = toy(words, tmp_path)
    assert done.code == 0, done.err
    summary, trained = (json.loads((run / "summary.json").read_text()) for run in (tmp_path / "runs/r", cwd / "runs/a"))
    assert summary["val/loss"] == trained["val/loss"]
    assert (summary["steps"], summary["samples"]) == (0, 0)


FAILING = """
import errno
from toy_recipe import Toy

class Failing(Toy):
    def export(self, model, folder):
        raise OSError(errno.ENOSPC, "No space left on device", "weights")
"""


def test_an_export_that_fails_leaves_the_summary(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    path = f"{tmp_path}{os.pathsep}{PYTHONPATH}"
    words = ["recipe._target_=failing.Failing", "trainer.allow_targets=[failing]", "trainer.max_steps=1"]
    done = toy([*words, "trainer.run_dir=runs/r"], tmp_path, PYTHONPATH=path)
    assert done.code == 1 and done.err.startswith("echelon: weights: No space left on device; make room"), done.err
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["steps"] == 1
    assert "checkpoint  ckpt/r/step-00000001\n" in done.out and "export  " not in done.out
    assert "exporting to runs/r/export\n" in done.out  # told before, for it may take minutes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["optimizer.lr=1e-3,1e-2"],
            "echelon: optimizer.lr=1e-3,1e-2: one run takes one value; 'echelon -m optimizer.lr=",
        ),
        (["evaluate"], "echelon evaluate: the following arguments are required: checkpoint"),
        (["trainer.max_steps=1.5"], "echelon: trainer.max_steps=1.5: must be int or null, not float"),
    ],
)
def test_a_usage_error_has_the_exit_code_of_a_config_error(words, line, tmp_path):
    done = run(words, tmp_path)
    assert done.code == 78 and done.err.splitlines()[-1].startswith(line)


def test_torch_logs_that_torch_does_not_know_are_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.main", "recipe=x"], cwd=tmp_path, env={**os.environ, "TORCH_LOGS": "nonsense"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("echelon: TORCH_LOGS=nonsense: torch knows no such name; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["recipe=bert_tiny"], ["--help"], ["compare", "a"]])
def test_a_working_folder_that_was_removed_is_one_line(words, tmp_path):
    """As a CI job's, by a clean-up."""
    script = 'mkdir gone && cd gone && rmdir "$PWD" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "trainer.main", *words], cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 78 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        f"echelon: {tmp_path}/gone: the working folder can't be found (No such file or directory); cd to another"
    )
