"""A rank that the supervisor or a launcher has started, and what it reports when it fails."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import record

from trainer.errors import exit_code, told
from trainer.process.environment import Place
from trainer.process.exit import let_first_tell
from trainer.process.signals import Signals
from trainer.session import train


def train_as_rank(descriptor: int, typed: list[str]) -> int:
    """A rank that a `Supervisor` started. What it fails with goes to the file that the supervisor reads."""
    faulthandler.enable()
    try:
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # at no position: all ranks share it
        os.close(descriptor)
        config: Any = OmegaConf.to_container(OmegaConf.create(text.decode()))
        log_file = Path(config["trainer"]["run_dir"], "logs", f"rank{os.environ['RANK']}.log")
        signal.signal(signal.SIGUSR2, lambda *_: None)  # so that `Signals` hears of it, too
        faulthandler.register(signal.SIGUSR2, log_file.open("a"), chain=True)  # all stacks, for the supervisor
        alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]  # else srun tells of another node's failure
        return (train if alone else attempt)(config, Path(config["trainer"]["run_dir"]).name, typed)
    except BaseException as error:
        text = told(error)
        if int(os.environ["RANK"]):
            print(text, file=sys.stderr)  # into this rank's log
        report = {"time": time.time(), "text": text, "code": exit_code(error), "in_collective": in_collective(error)}
        with contextlib.suppress(OSError):
            Path(os.environ["ECHELON_ERROR_FILE"]).write_text(json.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report["code"])  # an orderly end may wait for peers that wait for this rank


def train_under_launcher(config: dict[str, Any], name: str, typed: list[str], place: Place) -> int:
    """A rank that torchrun, mpirun or srun started. torchrun prints the first failure of all, as `record` noted it."""
    terminal = os.dup(2)
    torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ  # else nobody prints what `record` noted
    try:
        return (record(attempt) if torchrun else attempt)(config, name, typed, place) or 0
    except Exception as error:
        text = told(error)
        if not os.path.sameopenfile(terminal, 2):
            print(text, file=sys.stderr)  # into this rank's log
        if not torchrun or text.startswith("echelon: "):
            let_first_tell()
            os.write(terminal, f"{text}\n".encode())
        sys.stdout.flush()
        os._exit(exit_code(error))


def attempt(config: dict[str, Any], name: str, typed: list[str], place: Place | None = None) -> int:
    try:
        return train(config, name, typed, place)
    except Exception as error:
        if in_collective(error):
            time.sleep(8)  # a peer has failed before: the launcher tells of it, and ends this rank meanwhile
            if Signals.heard:  # or has asked it to end, when that was still obeyed
                os._exit(128 + signal.Signals[Signals.heard])
        raise


def in_collective(error: BaseException) -> bool:
    """Whether it may be a peer that has failed."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)
