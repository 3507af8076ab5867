"""The command: compose configs with Hydra, check them, then train or start the ranks that do."""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from trainer import __version__
from trainer.errors import ConfigError, exit_code, nearest, told
from trainer.launch import STOPPED, detect, die_with_parent, leave, let_first_tell, refuse_crowd, refuse_nodes
from trainer.secret import remove_with_secrets, word_without_secrets
from trainer.signals import Start, outlive_readers

HERE = Path(__file__).parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # in a wheel, in a checkout
TYPED = {
    "recipe": "recipe=NAME",
    "callbacks": "+callbacks=[NAME,...]",
    "optimizer": "optimizer=NAME",
    "schedule": "schedule=NAME",
    "nccl": "nccl=NAME",
}
USAGE = """Echelon trains PyTorch models; every distributed-training optimisation is a callback.

  python -m trainer.main                                                  trains a small BERT on real text
  python -m trainer.main recipe=bert_large trainer.devices=8              one process starts eight ranks
  python -m trainer.main recipe=bert_large '+callbacks=[grad_compress,overlap]' callbacks.grad_compress.codec=fp16
  python -m trainer.main trainer.resume=ckpt/last.pt                      goes on where a run stopped
  python -m trainer.main -m optimizer.lr=1e-3,3e-4                        one run per value
  python -m trainer.main --config-dir my/conf recipe=mine                 your own recipe
  python -m trainer.main --cfg job --resolve                              shows every knob, and runs nothing
  torchrun --nproc-per-node 8 -m trainer.main recipe=bert_large           under torchrun; srun and mpirun likewise
"""


class Job(NamedTuple):
    config: Any
    recipe: str
    typed: list[str]  # the arguments that lead to this config, to be shown


def main() -> None:
    if {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        die_with_parent()  # torchrun's agent, or mpirun, which may be killed
    outlive_readers()
    os.environ.setdefault("WDS_SECURE", "1")  # for a recipe that imports webdataset
    Start().__enter__()  # to the end of the process
    leave(guarded(lambda: command(sys.argv[1:])))


def guarded(call: Callable[[], int]) -> int:
    """The exit code of `call`; of a user's mistake one line is printed, of ours the traceback."""
    try:
        return call()
    except Exception as error:
        let_first_tell()
        print(told(error), file=sys.stderr, flush=True)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def command(arguments: list[str]) -> int:
    """The exit code of the worst of the jobs that `arguments` describe."""
    if arguments[:1] == ["--resolved"]:
        die_with_parent(int(os.environ["ECHELON_PARENT"]))  # before anything that takes time
        from trainer.session import train_as_rank

        return train_as_rank(int(arguments[1]), arguments[2:])
    folders = [CONF, *own_folders(arguments)]
    if {"-h", "--help"} & set(arguments):
        print(usage(folders))
        return 0
    if "--version" in arguments:
        print(f"echelon-trainer {__version__} (torch {metadata.version('torch')})")
        return 0
    from trainer.config import check

    jobs, codes = compose(arguments, folders), [0]
    place = detect(dict(os.environ))
    if len(jobs) > 1 and place.world > 1:
        raise ConfigError(
            f"-m: gives {len(jobs)} runs, and {place.launcher} started {place.world} ranks for one; "
            f"call {place.launcher} once a run, or start all without it, with trainer.devices=N"
        )
    for job in jobs:
        check(job.config)
    for job in jobs:
        codes.append(guarded(lambda: run(*job)))  # noqa: B023 called at once
        if codes[-1] in (STOPPED, 130):
            break
    return max(codes)


def own_folders(arguments: list[str]) -> list[Path]:
    """What --config-dir names."""
    names = [b for a, b in itertools.pairwise(arguments) if a in ("--config-dir", "-cd")]
    names += [a.partition("=")[2] for a in arguments if a.startswith("--config-dir=")]
    for name in names:
        if not Path(name).is_dir():
            raise ConfigError(f"--config-dir {name}: is not a folder; give the one that holds recipe/NAME.yaml")
    return [Path(name) for name in names]


def choices(group: str, folders: list[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def usage(folders: list[Path]) -> str:
    """With every choice of every group, and the first line of its file."""
    lines = [USAGE]
    for group, typed in TYPED.items():
        lines.append(typed)
        for name, path in choices(group, folders).items():
            comments = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
            lines.append(f"  {name:<22} {next((text for text in comments if not text.startswith('@')), '')}")
        lines.append("")
    return "\n".join(lines)


def compose(arguments: list[str], folders: list[Path]) -> list[Job]:
    """Hydra's part: groups, overrides, multirun. Without a job where it only shows something."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    jobs: list[Job] = []
    swept: set[Path] = set()  # what Hydra writes of a multirun
    flags = [word for folder in folders[1:] for word in ("--config-dir", str(folder))]

    def collect(config: DictConfig) -> None:
        chosen = HydraConfig.get()
        overrides: Any = OmegaConf.to_container(chosen.overrides.task)  # as they are: they may hold ${...}
        typed = [word_without_secrets(as_typed(override)) for override in overrides]
        swept.add(Path(chosen.sweep.dir, "multirun.yaml"))
        recipe = dict(chosen.runtime.choices).get("recipe", "")
        jobs.append(Job(OmegaConf.to_container(config, resolve=True), recipe, [*flags, *typed]))

    words = merged([normal(word, folders) for word in arguments])
    sys.argv[1:] = sorted(words, key=is_override)  # argparse takes positional arguments in one piece only
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)()
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(f"{said.getvalue().strip().rpartition('error: ')[2]}; see --help") from None
        raise
    except Exception as error:
        raise ConfigError(explain(error, folders)) from None
    sys.stderr.write(said.getvalue())
    for file in filter(Path.exists, swept):
        remove_with_secrets(file)
    return jobs


def as_typed(override: str) -> str:
    """Without what `normal` and, in a multirun, Hydra make of it."""
    if override.startswith("~"):
        return override.removesuffix("=null")
    return re.sub(r"\$\\{.*?\\}", lambda found: re.sub(r"\\(.)", r"\1", found[0]), override.removeprefix("++"))


def explain(error: Exception, folders: list[Path]) -> str:
    """Hydra's error in one line."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = choices(group, folders)
        return f"{group}={name}: there is no such {group.removesuffix('s')}; {nearest(name, known)}"
    if isinstance(error, OverrideParseException):
        word = word_without_secrets(error.override.removeprefix("++"))
        shell, text = "'+callbacks=[a,b]'", "'recipe.text=\"a(b).txt\"'"
        return (
            f"{word}: can't be read as KEY=VALUE; quote it for the shell, as in {shell}, and text twice, as in {text}"
        )
    text = " ".join(str(error).split())
    if absent := re.search("delete from config. '(.*)' does not exist", text):
        return f"~{absent[1]}: this run has none; see --cfg job"
    reason, _, key = text.partition(" full_key: ")  # OmegaConf's
    return f"{key.split()[0]}: {reason}; see --cfg job" if key else f"{reason}; see --cfg job"


def is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def normal(word: str, folders: list[Path]) -> str:
    """The argument as Hydra shall take it. Any key may be new to it: `check` knows them all, and says more.
    `callbacks=[...]` and `+callbacks=[...]` mean the same, and may name a default one."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if not equals or not name or word[0] in "-~" or re.search("[@/]", name) or name.startswith("hydra."):
        return word
    if name == "callbacks":
        value = "" if value == "null" else value
        return f"callbacks={value if '[' in value else f'[{value}]'}"
    if any((folder / name).is_dir() for folder in folders):
        if value == "null":
            raise ConfigError(f"{word}: a run needs one; there are {', '.join(choices(name, folders))}")
        return word
    return f"++{name}={value}"


def merged(words: list[str]) -> list[str]:
    """With one list of callbacks, of which Hydra would heed the last only; without those that every run has."""
    given = [re.findall(r"\[([^][]*)\]", word) for word in words if word.startswith("callbacks=")]
    if not given or [] in given:  # none, or one that Hydra shall refuse
        return words
    default = re.findall(r"^  - callbacks/(\w+)", (CONF / "config.yaml").read_text(), re.MULTILINE)
    lists = []
    for several in itertools.product(*given):  # each may be a sweep
        names = [name.strip() for name in ",".join(several).split(",")]
        lists.append(f"[{','.join(dict.fromkeys(name for name in names if name and name not in default))}]")
    return [f"callbacks={','.join(lists)}", *(word for word in words if not word.startswith("callbacks="))]


def run(config: dict[str, Any], recipe: str, typed: list[str]) -> int:
    """Train in this process, or start the ranks."""
    from trainer.batch import split_batch
    from trainer.config import settings
    from trainer.nccl import NCCLOptions, applied
    from trainer.options import Options

    options = settings(Options, config["trainer"])
    place = detect(os.environ, options.devices, options.nodes)
    if (place.starts or not place.launcher) and options.accelerator != "cuda":
        refuse_crowd(options.devices)
    refuse_nodes(place, os.environ, options.nodes, options.resume, options.run_dir)
    world = place.world if place.launcher else options.devices
    if isinstance(world, int) and not options.resume and isinstance(options.nodes, int):  # else the plan says
        split_batch(config["batch"], world, config["micro_batch"], config["accumulate"])
    # Read when torch loads: idle OpenMP threads sleep. Spinning, they take the cores that ranks and data workers need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from trainer.session import start

    with applied(settings(NCCLOptions, config["nccl"]), os.environ):
        return start(config, recipe, typed, place)


if __name__ == "__main__":
    main()
