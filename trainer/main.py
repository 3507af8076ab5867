"""The command: compose configs with Hydra, check them, then train or start the ranks that do."""

import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.config.compose import CONF, TYPED, choices, compose, own_folders
from trainer.errors import STOPPED, ConfigError, exit_code, told
from trainer.process.environment import detect, refuse_crowd, refuse_nodes
from trainer.process.exit import die_with_parent, leave, let_first_tell
from trainer.process.signals import Start
from trainer.process.stdio import outlive_readers

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
        from trainer.launch.worker import train_as_rank

        return train_as_rank(int(arguments[1]), arguments[2:])
    folders = [CONF, *own_folders(arguments)]
    if {"-h", "--help"} & set(arguments):
        print(usage(folders))
        return 0
    if "--version" in arguments:
        print(f"echelon-trainer {__version__} (torch {metadata.version('torch')})")
        return 0
    from trainer.config.check import check

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


def run(config: dict[str, Any], recipe: str, typed: list[str]) -> int:
    """Train in this process, or start the ranks."""
    from trainer.batch import split_batch
    from trainer.comm.nccl import NCCLOptions, applied
    from trainer.config.build import settings
    from trainer.config.options import Options

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
    # Read at the process's first cuBLAS call. `trainer.deterministic` needs it; 32 MiB is what Hopper has anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from trainer.launch.launcher import start

    with applied(settings(NCCLOptions, config["nccl"]), os.environ):
        return start(config, recipe, typed, place)


if __name__ == "__main__":
    main()
