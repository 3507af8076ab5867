"""echelon tune: finds a faster config of a run, proves it on short runs, writes it for +tuned=NAME."""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainer
from trainer.config.folders import CONF, config_dirs
from trainer.cost.workload import Choice
from trainer.errors import printable
from trainer.process.exit import run_guarded
from trainer.tools.tune.options import TuneOptions, read_options
from trainer.tools.tune.start import one_job, prepare, run_team

UNCHANGED = 77  # exit code: today's config stays
FEW = 5  # trials
USAGE = """echelon tune [ARGUMENTS OF THE RUN] [tune.KEY=VALUE ...]

Finds a faster config of the run, proves it on short runs, and writes it for +tuned=NAME. Under torchrun or srun it runs
on the launcher's ranks, else it starts trainer.devices of its own. Checkpoints and folders of runs stay untouched.

  echelon tune recipe=bert_large trainer.devices=8
  torchrun --nproc-per-node 8 -m trainer.tools.tune recipe=bert_large tune.lossy=true

  tune.budget_s=600.0      seconds of the whole search, with the canary
  tune.lossy=false         also callbacks that change the numbers, judged by time to loss
  tune.apply=false         prints the command by which the running job trainer.run_dir is resumed with the result
  tune.without=[]          callbacks that are never tried: tune.without=[compile]
  tune.name=null           name of the result, conf/tuned/NAME.yaml; null: the recipe's
  tune.steps=20            timed steps of a short run, after tune.warm=3
  tune.pairs=5             pairs of short runs in the canary: today's config, then the winner
  tune.limit_s=300.0       seconds of one short run; one that takes longer has failed
  tune.bound=0.01          share by which a lossy config's loss may be larger

Exit codes: 0, the result is written; 77, today's config stays; others as of a run."""


def main() -> int:
    return run_guarded(lambda: command(sys.argv[1:]))


def command(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    options, words = read_options(arguments)
    job = one_job(words, "tune")
    if job is None:
        return 0
    if options.apply:
        from trainer.tools.tune.apply import refuse_other_job

        refuse_other_job(job.config)
    prepare()
    from trainer.tools.tune.overlay import file_name
    from trainer.tools.tune.tasks import run_task

    folder, name = next(iter(config_dirs(words)), Path("conf")), options.name or file_name(job.recipe)
    return run_team(job.config, run_task, lambda team: lead(team, job.config, options, folder, name, job.argv))


def lead(team: Any, config: dict[str, Any], options: TuneOptions, folder: Path, name: str, argv: Sequence[str]) -> int:
    """Search on the first process, and write the result."""
    import torch

    from trainer.config.tuned import cpu_name, gpu_models
    from trainer.tools.tune.apply import switch
    from trainer.tools.tune.configs import begun, find_start
    from trainer.tools.tune.journal import Journal
    from trainer.tools.tune.overlay import overlay, refuse_others, write
    from trainer.tools.tune.search import OVER
    from trainer.tools.tune.tuning import Tuning

    place, settings = team.place, {**dataclasses.asdict(options), "budget_s": 0, "apply": 0}
    refuse_others(folder, name)
    machine = [cpu_name(), os.cpu_count(), gpu_models(), place.world, place.local_world]
    versions = [trainer.__version__, torch.__version__]
    journal = Journal(folder / "tuned" / f"{name}.jsonl", [config, machine, versions, settings])
    known = journal.all("start") or [journal.add("start", checkpoint=find_start(config))]
    config = begun(config, known[0]["checkpoint"])
    tuning = Tuning(config, options, team, journal, say)
    if journal.discarded:
        say(f"journal    {journal.path} {journal.discarded}: a new search begins")
    with contextlib.closing(journal):
        choice, verdict, tuned, evidence = tuning.run()
        if verdict is None and tuning.why == OVER:
            say(f"result     today's config stays: {OVER}; {larger_budget(tuning)}")
            return UNCHANGED
        path = None
        if verdict is not None and verdict.recommended:
            path = write(folder, name, overlay(config, choice, tuned, evidence))
        journal.add("verdict", choice=dataclasses.asdict(choice), **(dataclasses.asdict(verdict) if verdict else {}))
    if verdict is None:
        say("result     today's config stays: nothing that was tried is faster")
        return UNCHANGED
    for line in verdict.findings:
        say(f"canary     {line}")
    for line in verdict.faults:
        say(f"result     today's config stays: {line}")
    if path is None:
        return UNCHANGED
    say(f"result     {path}: use it by +tuned={name}{hint(folder, argv, choice)}")
    if options.apply:
        say(f"apply      {switch(config, choice, place.world, name, folder)}")
    return 0


def larger_budget(tuning: Any) -> str:
    """Return how to resume with a budget that suffices for the canary and a few trials."""
    trials_s = FEW * (tuning.cost_s + tuning.options.steps * tuning.today["step_s"])
    enough = math.ceil((tuning.elapsed_s + tuning.canary_s + trials_s) / 60) * 60
    return f"the search resumes from its journal with tune.budget_s={enough}"


def hint(folder: Path, argv: Sequence[str], choice: Choice) -> str:
    """Return what a run needs besides `+tuned=NAME` to find the file, and the words that would override it."""
    found = "--config-dir" in argv or folder.resolve() == CONF.resolve()
    over = [word for word in argv if word.partition("=")[0].lstrip("+") in choice.settings]
    return ("" if found else f" with --config-dir {folder}") + (f", without {' '.join(over)}" if over else "")


def say(text: str) -> None:
    print(printable(text), flush=True)


if __name__ == "__main__":
    sys.exit(main())
