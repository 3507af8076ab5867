"""The command: composes configs with Hydra, checks them, and trains or starts the ranks; or runs a tool."""
# ruff: noqa: E402 a SIGTERM during the imports has to end the command like a run

import importlib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import trainer
from trainer.process.early import stop_early

stop_early()

from trainer.config.folders import CONF, TYPED, choices, config_dirs, naming_defaults
from trainer.errors import STOPPED, ConfigError, nearest, printable
from trainer.log import show
from trainer.process.environment import USUAL, avoid_foreign_cache, detect, forget_ranks, raise_file_limit, refuse_nodes
from trainer.process.exit import die_with_parent, exit_process, refuse_exit, run_guarded
from trainer.process.signals import SignalListener, StartupSignals, undo_inherited
from trainer.process.stdio import open_standard_descriptors, tolerate_closed_pipes
from trainer.redact import redact_argument

if TYPE_CHECKING:
    from trainer.config.compose import Job

USAGE = """Echelon trains PyTorch models; distributed-training optimisations are callbacks and keys.

  echelon                                                  trains a small BERT on real text
  echelon recipe=bert_large trainer.devices=8              one process starts eight ranks
  echelon recipe=bert_large '+callbacks=[grad_compress,overlap]' callbacks.grad_compress.codec=fp16
  echelon resume runs/NAME                                 resumes a run where it stopped
  echelon trainer.resume=ckpt/last.pt                      the same, for a config that is typed again
  echelon -m optimizer.lr=1e-3,3e-4                        one run per value
  echelon recipe=mine.py batch=64 trainer.max_steps=100    your own recipe: the class in mine.py
  echelon --config-dir conf recipe=mine                    the same, with its settings in conf/recipe/mine.yaml
  echelon --cfg job --resolve                              shows every knob, and runs nothing
  torchrun --nproc-per-node 8 -m trainer.main recipe=bert_large
                                                           under torchrun; srun and mpirun likewise
  echelon report runs/NAME                                 a tool, see below; echelon TOOL --help says more

python -m trainer.main takes the same arguments, where the command is not installed.
"""

TOOLS = Path(__file__).parent / "tools"
LOCAL_RANK = re.compile("--local[-_]rank=[0-9]+")  # torch.distributed.launch appends it; LOCAL_RANK has the same


def main() -> None:
    """Run the command, and exit with its code."""
    prepare()
    sys.argv[1:] = [word for word in sys.argv[1:] if not LOCAL_RANK.fullmatch(word)]
    if sys.argv[1:2] and sys.argv[1] in tools():
        run_tool(*sys.argv[1:])
    run_and_exit(lambda: command(sys.argv[1:]))


def prepare() -> None:
    """Set up this process for a command. A second call has no effect."""
    open_standard_descriptors()
    undo_inherited()
    if getattr(trainer, "DISTRIBUTION", "") != "echelon-trainer":  # not its docstring, which python -OO leaves out
        sys.exit(f"echelon: {trainer.__file__} is another package's; give Echelon an environment of its own")
    if code := run_guarded(find_recipes):
        sys.exit(code)
    forget_ranks(os.environ)
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"} & set(os.environ):
        die_with_parent()  # torchrun's agent or mpirun may be killed first
    tolerate_closed_pipes()
    raise_file_limit()
    os.environ.setdefault("WDS_SECURE", "1")  # for a recipe that imports webdataset
    if code := run_guarded(refuse_logs):
        sys.exit(code)


def find_recipes() -> int:
    """Let the command `echelon` import recipes from the working folder, as `python -m` does.

    Raises:
        ConfigError: The working folder was removed.
    """
    try:
        here = os.getcwd()
    except OSError as error:
        folder = printable(os.environ.get("PWD", "."))
        raise ConfigError(f"{folder}: the working folder can't be found ({error.strerror}); cd to another") from None
    if "" not in sys.path and here not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(here)
    return 0


def refuse_logs() -> int:
    """Refuse a TORCH_LOGS that torch can't parse, because importing torch would raise. Only torch knows the names.

    Raises:
        ConfigError: It has an unknown name.
    """
    if logs := os.environ.get("TORCH_LOGS"):
        try:
            import torch  # noqa: F401
        except ValueError:
            hint = "TORCH_LOGS=help python -c 'import torch' lists all"
            raise ConfigError(f"TORCH_LOGS={printable(logs)}: torch knows no such name; {hint}") from None
    return 0


def run_and_exit(call: Callable[[], int]) -> NoReturn:
    """Call what trains, and exit with its code."""
    StartupSignals().__enter__()  # to the end of the process
    code = run_guarded(call)
    exit_process(code)


def command(arguments: list[str]) -> int:
    """Run the jobs that `arguments` describe; return the worst exit code."""
    folders = [CONF, *config_dirs(arguments)]
    if {"-h", "--help"} & set(arguments):
        print(usage(folders))
        return 0
    if "--version" in arguments:
        from importlib import metadata

        print(f"echelon-trainer {trainer.__version__} (torch {metadata.version('torch')})")
        return 0
    if arguments and "=" not in arguments[0] and arguments[0][:1] not in ("-", "~"):
        raise unknown_word(arguments)
    from trainer.config.check import check
    from trainer.config.compose import compose

    jobs, codes, wrote = compose(arguments, folders), [0], list[bool]()
    if not jobs and {"-m", "--multirun"} & set(arguments) and not any(map(shows, arguments)):
        raise ConfigError("-m: gives no run, as glob(*) does for a key that is no group; give values, as in KEY=A,B")
    place = detect(dict(os.environ))
    if len(jobs) > 1 and place.world > 1:
        raise ConfigError(
            f"-m: gives {len(jobs)} runs, and {place.launcher} started {place.world} ranks for one; "
            f"call {place.launcher} once per run, or start all runs without {place.launcher}, with trainer.devices=N"
        )
    for job in jobs:
        check(job.config)
    if len(jobs) > 1:
        refuse_shared(jobs)
        name_folders(jobs)
    again = folder_each(jobs) if jobs else ""
    for n, job in enumerate(jobs, start=1):
        SignalListener.last_words = last_words(jobs, n, again)
        if len(jobs) > 1:
            job = job._replace(messages=[(logging.INFO, f"run {n} of {len(jobs)}"), *job.messages])
        before = written(job)
        codes.append(run_guarded(lambda: run(*job)))  # noqa: B023 called at once
        wrote.append(written(job) != before)
        if codes[-1] in (STOPPED, 130):
            break
    SignalListener.last_words = ""
    if len(jobs) > 1:
        compare(jobs, codes[1:], wrote)
        print(not_started(jobs, len(wrote), again), end="", file=sys.stderr, flush=True)
    return max(codes)


def unknown_word(arguments: list[str]) -> ConfigError:
    word = printable(arguments[0])
    if word in ("train", "fit", "run"):
        rest = shlex.join(["echelon", *map(redact_argument, arguments[1:])])
        return ConfigError(f"{word}: leave this word out, because echelon itself trains: {rest}")
    return ConfigError(f"{word}: is neither a tool nor KEY=VALUE; {nearest(word, tools())}; see --help")


def shows(word: str) -> bool:
    """Return whether an argument makes Hydra show a config instead of running."""
    return word.partition("=")[0] in ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")


def refuse_shared(jobs: "list[Job]") -> None:
    """Refuse runs of a multirun that would resume each other, or write into one folder.

    The first would make all steps, and the rest none.
    """
    given = [job.config["trainer"] for job in jobs]
    resumed = [(each["resume"], each["run_dir"], each["checkpoint"]["dir"]) for each in given if each["resume"]]
    for resume, *places in resumed:
        if (same := resumed.count((resume, *places))) > 1:
            raise ConfigError(
                f"trainer.resume={resume}: {same} runs of -m would resume one run; "
                f"give each a folder, as in {folder_each(jobs)}"
            )
    new = [each for each in given if each["run_dir"] and not each["resume"] and not each["dry_run"]]
    written = [folder for each in new for folder in folders_of(each)]
    for each in new:
        if (same := max(map(written.count, folders_of(each)))) > 1:
            raise ConfigError(
                f"trainer.run_dir={each['run_dir']}: {same} runs of -m would write into one folder of this name; leave "
                f"this out, or give each a folder, as in {folder_each(jobs)}"
            )


def folder_each(jobs: "list[Job]") -> str:
    """Return a setting that gives each run of a multirun a folder, by the keys in which the runs differ."""
    common = set(jobs[0].argv).intersection(*(job.argv for job in jobs))
    words = [word.lstrip("+~").partition("=")[0] for job in jobs for word in job.argv if word not in common]
    own = ("batch", "micro_batch", "accumulate")  # other words without a dot choose a file
    keys = [
        key
        for key in dict.fromkeys(words)
        if key in own or ("." in key and key not in ("trainer.run_dir", "trainer.resume"))
    ]
    keys = keys or ["optimizer.lr"]
    return f"'trainer.run_dir=runs/{'-'.join(f'${{{key}}}' for key in keys)}'"


def folders_of(options: dict[str, Any]) -> set[str]:
    """Return the folders that a new run writes: its own and that of its checkpoints."""
    own = options["run_dir"]
    return {os.path.realpath(own), os.path.realpath(Path(options["checkpoint"]["dir"], Path(own).name))}


def name_folders(jobs: "list[Job]") -> None:
    """Name the folders of a multirun's new runs after their overrides."""
    from trainer.config.compose import told_apart

    began, taken = time.strftime("%Y%m%d-%H%M%S"), set[str]()
    for job in jobs:
        options = job.config["trainer"]
        if options["run_dir"] is None and options["resume"] is None:
            stem = f"runs/{told_apart(job, jobs)}-{began}"
            folders = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
            options["run_dir"] = next(folder for folder in folders if folder not in taken)
            taken.add(options["run_dir"])


def not_started(jobs: "list[Job]", begun: int, folder: str) -> str:
    """Name the runs of a multirun after the first `begun` in a line, and how to continue; "" if there are none."""
    from trainer.config.compose import own_words

    words = (printable(shlex.join(map(redact_argument, own_words(job, jobs)))) for job in jobs[begun:])
    rest = "; ".join(each or "(the same words)" for each in words)
    if not rest:
        return ""
    how = "the same command continues"
    if any(job.config["trainer"]["resume"] != "auto" for job in jobs):
        how = f"start each without -m; with {folder} trainer.resume=auto, a sweep continues when it is typed again"
    return f"echelon: {len(jobs) - begun} of {len(jobs)} runs were not started: {rest}; {how}\n"


def last_words(jobs: "list[Job]", begun: int, folder: str) -> str:
    """Return what to print if a signal ends this process at once in run `begun`, so that no table is printed."""
    folders = [path for job in jobs[: begun - 1] if (path := job.config["trainer"]["run_dir"])]
    ended = f"echelon: the runs that ended: {shlex.join(['echelon', 'compare', *folders])}\n" if folders else ""
    return ended + not_started(jobs, begun, folder)


def written(job: "Job") -> list[tuple[str, int]]:
    """Return the files of a run that its report reads, each with the time of its last change."""
    folder = job.config["trainer"]["run_dir"]
    return [(path.name, path.stat().st_mtime_ns) for path in sorted(Path(folder).glob("*.json*"))] if folder else []


def compare(jobs: "list[Job]", codes: list[int], wrote: list[bool]) -> None:
    """Print a table of the jobs that have begun. A resumed run has a table of its own: its folder is not known here."""
    begun = [
        (Path(options["run_dir"]), job.config, code, new)
        for job, code, new in zip(jobs, codes, wrote, strict=False)
        if (options := job.config["trainer"])["run_dir"] and not options["dry_run"]
    ]
    if begun:  # an error here is no run's
        run_guarded(lambda: importlib.import_module("trainer.tools.compare").compare_jobs(begun))


def tools() -> dict[str, Path]:
    """Return the tools by name: the modules and packages of trainer/tools that `python -m` can run."""
    packages = {path.parent.name: path for path in TOOLS.glob("*/__main__.py")}
    modules = {path.stem: path for path in TOOLS.glob("[!_]*.py") if "\ndef main(" in path.read_text()}
    return dict(sorted({**packages, **modules}.items()))


def run_tool(name: str, *arguments: str) -> NoReturn:
    """Run `python -m trainer.tools.NAME ARGUMENTS` in this process, and exit."""
    import runpy

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [name, *arguments]
    runpy.run_module(f"trainer.tools.{name}", run_name="__main__", alter_sys=True)
    sys.exit(0)


def usage(folders: list[Path]) -> str:
    """Return the help: every tool, and every choice of every group, with the first comment of its file."""
    lines = [USAGE, "echelon TOOL ARGUMENTS"]
    for name, path in tools().items():
        summary = path.read_text().partition('"""')[2].partition('"""')[0].partition("\n")[0]
        lines.append(f"  {name:<22} {summary.rpartition(': ')[2]}")
    lines.append("")
    for group, typed in TYPED.items():
        lines.append(typed)
        for name, path in choices(group, folders).items():
            comments = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
            lines.append(f"  {name:<22} {next((text for text in comments if not text.startswith('@')), '')}")
        lines.append("")
    return "\n".join(lines)


def run(config: dict[str, Any], recipe: str, argv: list[str], messages: Sequence[tuple[int, str]] = ()) -> int:
    """Check the settings that need no torch, then train in this process or start the ranks.

    Args:
        messages: Lines for the log, each with its level.
    """
    from trainer.comm.nccl import NCCLOptions, applied
    from trainer.config.batch import split_batch
    from trainer.config.build import build_options
    from trainer.config.options import Options

    options = build_options(Options, config["trainer"])
    place = detect(os.environ, options.devices, options.nodes)
    refuse_nodes(place, os.environ, options.nodes, options.resume, options.run_dir)
    world = place.world if place.launcher else options.devices
    staged = any("stages" in callback for callback in config["callbacks"].values())  # whose ranks share samples
    early = not options.resume and not staged and isinstance(options.nodes, int)
    if early and isinstance(world, int):  # else the plan does this
        with naming_defaults(argv):
            split_batch(config["batch"], world, config["micro_batch"], config["accumulate"])
    show(messages, place.rank)
    os.environ.update(USUAL | os.environ)
    avoid_foreign_cache(os.environ)
    from trainer.launch.launcher import start

    with refuse_exit(), applied(build_options(NCCLOptions, config["nccl"]), os.environ):
        return start(config, recipe, argv, place)


if __name__ == "__main__":
    main()
