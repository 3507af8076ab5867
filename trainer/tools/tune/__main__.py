"""python -m trainer.tools.tune: finds a faster config of a run, proves it on short runs, writes it for +tuned=NAME."""

import dataclasses
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainer
from trainer.config.build import build_options
from trainer.config.check import check
from trainer.config.compose import CONF, compose, config_dirs
from trainer.config.options import Options
from trainer.errors import ConfigError, printable
from trainer.process.environment import Place, avoid_foreign_cache, detect, raise_file_limit
from trainer.process.exit import run_guarded
from trainer.process.temporary import temporary_folder
from trainer.tools.tune.options import TuneOptions, read_options

COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # folders of code that trials compile
UNCHANGED = 77  # exit code: today's config stays
USAGE = """python -m trainer.tools.tune [ARGUMENTS OF THE RUN] [tune.KEY=VALUE ...]

Finds a faster config of the run, proves it on short runs, and writes it for +tuned=NAME. Under torchrun or srun it runs
on the launcher's ranks, else it starts trainer.devices of its own. Checkpoints and folders of runs stay untouched.

  python -m trainer.tools.tune recipe=bert_large trainer.devices=8
  torchrun --nproc-per-node 8 -m trainer.tools.tune recipe=bert_large tune.lossy=true

  tune.budget_s=600.0      seconds of the whole search, with the canary
  tune.lossy=false         also callbacks that change the numbers, judged by time to loss
  tune.apply=false         lets the running job trainer.run_dir take the result over at its next checkpoint
  tune.without=[]          callbacks that are never tried: tune.without=[compile]
  tune.name=null           name of the result, conf/tuned/NAME.yaml; null: the recipe's
  tune.steps=20            timed steps of a short run, after tune.warm=3
  tune.pairs=5             pairs of short runs in the canary: today's config, then the winner
  tune.limit_s=300.0       seconds of one short run; one that takes longer has failed
  tune.bound=0.01          share by which a lossy config's loss may be larger

Exit codes: 0, the result is written; 77, today's config stays; others as of python -m trainer.main."""


def main() -> int:
    return run_guarded(lambda: command(sys.argv[1:]))


def command(arguments: list[str]) -> int:
    """Search, and return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    options, words = read_options(arguments)
    folders = config_dirs(words)
    jobs = compose(words, [CONF, *folders])
    if len(jobs) != 1:
        if not jobs:  # Hydra has shown something
            return 0
        raise ConfigError(f"-m: gives {len(jobs)} runs, and tune takes one; leave -m out")
    check(jobs[0].config)
    if options.apply:
        from trainer.tools.tune.apply import find_run

        find_run(jobs[0].config)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    prepare()
    return tune(jobs[0].config, jobs[0].recipe, jobs[0].argv, options, folders[0] if folders else Path("conf"))


def stop(number: int, _: object) -> None:
    """End by a signal: what holds processes and files gives them back."""
    raise SystemExit(128 + number)


def prepare() -> None:
    """Set this process up as `trainer.main` does before torch loads."""
    raise_file_limit()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else forks could not open the GPUs
    os.environ.setdefault("WDS_SECURE", "1")
    avoid_foreign_cache(os.environ)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def tune(config: dict[str, Any], recipe: str, argv: Sequence[str], options: TuneOptions, folder: Path) -> int:
    """Search for a faster config of a checked one."""
    from trainer.log import log_to_terminal
    from trainer.tools.tune.orders import run_order
    from trainer.tools.tune.overlay import file_name
    from trainer.tools.tune.team import Team

    place = find_place(config)
    log_to_terminal(1)
    with temporary_folder() as temporary:
        for name in COMPILED:
            os.environ[name] = str(temporary / "compiled")
        importlib.import_module("torch._dynamo")  # for DDP and optimizers: each fork would take a second for it
        gc.freeze()
        team = Team(place, temporary, run_order)
        try:
            if not team.leads:
                team.obey()
                return 0
            return lead(team, config, options, folder, options.name or file_name(recipe), argv)
        finally:
            team.close()


def lead(team: Any, config: dict[str, Any], options: TuneOptions, folder: Path, name: str, argv: Sequence[str]) -> int:
    """Search on the first process, and write the result."""
    from trainer.tools.tune.apply import hand_over
    from trainer.tools.tune.candidates import NOTHING
    from trainer.tools.tune.journal import Journal
    from trainer.tools.tune.overlay import overlay, write
    from trainer.tools.tune.team import TrialFailed
    from trainer.tools.tune.tuning import Tuning

    place, settings = team.place, dataclasses.asdict(options)
    about = [config, place.world, place.local_world, trainer.__version__, {**settings, "budget_s": 0, "apply": 0}]
    journal = Journal(folder / "tuned" / f"{name}.jsonl", about)
    tuning = Tuning(config, options, team, journal, say)
    if journal.why_anew:
        say(f"journal    {journal.path} {journal.why_anew}: a new search begins")
    try:
        choice, verdict, tuned, evidence = tuning.run()
        journal.add("verdict", choice=dataclasses.asdict(choice), **(dataclasses.asdict(verdict) if verdict else {}))
    except TrialFailed as error:
        raise ConfigError(f"today's config does not run: {error}") from None
    finally:
        journal.close()
    if choice == NOTHING or verdict is None:
        say("result     today's config stays: nothing that was tried is faster")
        return UNCHANGED
    for line in verdict.findings:
        say(f"canary     {line}")
    if not verdict.recommended:
        for line in verdict.faults:
            say(f"result     today's config stays: {line}")
        return UNCHANGED
    path = write(folder, name, overlay(config, choice, tuned, evidence))
    say(f"result     {path}: use it by +tuned={name}{hint(folder, argv)}")
    if options.apply:
        say(f"apply      {hand_over(Path(config['trainer']['run_dir']), choice, place.world, name, folder)}")
    return 0


def hint(folder: Path, argv: Sequence[str]) -> str:
    """Return what a run needs beside `+tuned=NAME` to find the file."""
    found = "--config-dir" in argv or folder.resolve() == CONF.resolve()
    return "" if found else f" with --config-dir {folder}"


def find_place(config: dict[str, Any]) -> Place:
    """Return this process's place: a launcher's rank, or the first of all ranks of this machine."""
    from trainer.launch.launcher import count_devices

    options = build_options(Options, config["trainer"])
    place = detect(os.environ, options.devices, options.nodes)
    if place.launcher:
        return place
    devices, _ = count_devices(options)
    return Place(0, devices, 0, devices, starts=True)


def say(text: str) -> None:
    print(printable(text), flush=True)


if __name__ == "__main__":
    sys.exit(main())
