"""The command: compose a config with Hydra, check it, then train or start the ranks that do. The only file that knows Hydra."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, DataError, exit_code

HERE = Path(__file__).parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # in a wheel, in a checkout

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
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(usage(arguments))
        return
    rank = arguments[:1] == ["--resolved"]
    sys.exit(guarded(lambda: train_rank(arguments[1:]) if rank else compose(arguments)))


def guarded(call: Callable[[], int]) -> int:
    """The exit code of `call`; of a user's mistake one line is printed, of ours the traceback."""
    try:
        return call()
    except (ConfigError, DataError) as error:
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def usage(arguments: list[str]) -> str:
    """With every recipe, callback, optimizer and schedule, and the first line of its file."""
    own = [Path(b) for a, b in zip(arguments, arguments[1:], strict=False) if a in ("--config-dir", "-cd")]
    own += [Path(a.partition("=")[2]) for a in arguments if a.startswith("--config-dir=")]
    lines = [USAGE]
    for group, typed in (
        ("recipe", "recipe=NAME"),
        ("callbacks", "+callbacks=[NAME,...]"),
        ("optimizer", "optimizer=NAME"),
        ("schedule", "schedule=NAME"),
    ):
        lines.append(f"{typed}")
        for file in sorted(path for folder in (CONF, *own) for path in (folder / group).glob("*.yaml")):
            first = next(
                (line for line in file.read_text().splitlines() if line.startswith("# ") and "@package" not in line), ""
            )
            lines.append(f"  {file.stem:<22} {first[2:]}")
        lines.append("")
    return "\n".join(lines)


def compose(arguments: list[str]) -> int:
    """Hydra's part: groups, overrides, multirun. The exit code of the worst job."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    codes = [0]

    def job(config: DictConfig) -> None:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        hydra_config = HydraConfig.get()
        recipe, overrides = hydra_config.runtime.choices["recipe"], list(hydra_config.overrides.task)
        codes.append(guarded(lambda: run(plain, recipe, overrides)))  # Hydra would add words of its own

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    sys.argv[1:] = [normal(argument) for argument in arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        from trainer.hints import explain

        raise ConfigError(explain(error, sys.argv[1:], CONF)) from None
    return max(codes)


def normal(argument: str) -> str:
    """`callbacks=[...]` and `+callbacks=[...]` mean the same, and may name a default one."""
    key, equals, value = argument.partition("=")
    if not equals or key.lstrip("+") != "callbacks" or "," in key:
        return argument
    names = [name.strip() for name in value.strip("[]").split(",")]
    default = [
        line.split("/")[1].strip()
        for line in (CONF / "config.yaml").read_text().splitlines()
        if line.startswith("  - callbacks/")
    ]
    return f"callbacks=[{','.join(name for name in names if name and name not in default)}]"


def run(config: dict[str, Any], recipe: str, overrides: list[str]) -> int:
    """Check, then train in this process, or start the ranks."""
    from trainer.config import check
    from trainer.launch import detect

    check(config)
    options = config["trainer"]
    place = detect(os.environ, options["devices"], options["nodes"])
    if place.launcher:
        from trainer.session import train_under_launcher

        return train_under_launcher(config, recipe, overrides)
    if options["nodes"] > 1:
        raise ConfigError(
            f"trainer.nodes={options['nodes']}: start it on each node with torchrun --nnodes={options['nodes']} ..., or with srun"
        )
    from trainer.preflight import count_devices, preflight

    devices = count_devices(options["accelerator"], options["devices"])
    if devices == 1:
        from trainer.session import train

        return train(config, recipe, overrides, place)
    return preflight(config, recipe, overrides, devices)


def train_rank(arguments: list[str]) -> int:
    from trainer.session import train_as_rank

    return train_as_rank(Path(arguments[0]), arguments[1:])


if __name__ == "__main__":
    main()
