"""Runs one rank, started by the supervisor or a launcher, and reports its failure."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from trainer.comm.ranks import in_collective
from trainer.errors import exit_code, fold, message
from trainer.plan import RunSpec
from trainer.process.environment import Place, mark_rank
from trainer.process.exit import wait_for_first_rank
from trainer.process.signals import StopSignals
from trainer.process.temporary import sockets_in, temporary_folder
from trainer.session import train
from trainer.timeouts import LAUNCHER_S


def run_rank(descriptor: int, argv: list[str]) -> int:
    """Run a rank started by a `Supervisor`, which reads the rank's report if it fails."""
    faulthandler.enable()
    mark_rank(os.environ)
    config, spec = read_run(descriptor)
    run_dir = Path(config["trainer"]["run_dir"])
    log_file = run_dir / "logs" / f"rank{os.environ['RANK']}.log"
    faulthandler.register(signal.SIGUSR2, log_file.open("a"), chain=True)  # all stacks, for the supervisor
    alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]  # else srun reports another node's failure
    with sockets_in(Path(os.environ["ECHELON_ERROR_FILE"]).parent):  # a folder that the supervisor removes
        run = train if alone else train_or_wait
        return run(config, run_dir.name, argv, spec=spec, on_error=report, end_failed=end_failed)


def end_failed(error: BaseException) -> NoReturn:
    """Report the error, and end this process at once: an orderly exit might wait for peers that wait for this rank."""
    report(error)
    text = message(error)
    if int(os.environ["RANK"]):
        print(text, file=sys.stderr)  # into this rank's log
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code(error))


def read_run(descriptor: int) -> tuple[dict[str, Any], RunSpec | None]:
    """Read the config and the decisions from the launcher's memory, which all ranks share."""
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # at position 0: the ranks share the position, too
    os.close(descriptor)
    run = json.loads(text)
    return run["config"], RunSpec(**run["spec"]) if run["spec"] else None


def report(error: BaseException) -> None:
    """Write the error for the supervisor before any clean-up, which may hang or abort. The first error is kept."""
    path = Path(os.environ["ECHELON_ERROR_FILE"])
    if not path.exists():
        text, code = message(error), exit_code(error)
        content = {"time": time.time(), "text": text, "code": code, "in_collective": in_collective(error)}
        try:
            path.write_text(json.dumps(content))
        except OSError:  # its folder is full, and may be the reason
            print(fold(text), file=sys.stderr, flush=True)


def train_under_launcher(config: dict[str, Any], name: str, argv: list[str], place: Place) -> int:
    """Run a rank started by torchrun, mpirun or srun. Torchrun prints the error that `record` wrote first."""
    terminal = os.dup(2)
    mark_rank(os.environ)
    torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ  # else no launcher prints the error that `record` wrote

    def end(error: BaseException, recorded: bool = False) -> NoReturn:
        """Print the error, unless torchrun prints the recorded one, and end this process."""
        text = message(error)
        if not os.path.sameopenfile(terminal, 2):
            print(text, file=sys.stderr)  # into this rank's log
        if not recorded or text.startswith("echelon: "):
            wait_for_first_rank()
            os.write(terminal, f"{fold(text)}\n".encode())
        sys.stdout.flush()
        os._exit(exit_code(error))

    try:
        with temporary_folder() as folder, sockets_in(folder):
            run = record(train_or_wait) if torchrun else train_or_wait
            return run(config, name, argv, place, end_failed=end) or 0
    except Exception as error:
        end(error, torchrun)


def train_or_wait(config: dict[str, Any], name: str, argv: list[str], *args: Any, **options: Any) -> int:
    """Train. If a collective fails, wait until the launcher reports the first failure and ends this rank."""
    try:
        return train(config, name, argv, *args, **options)
    except Exception as error:
        deadline = time.monotonic() + LAUNCHER_S * in_collective(error)
        while time.monotonic() < deadline:
            if StopSignals.received:  # the launcher had asked this rank to stop while it was still training
                os._exit(128 + signal.Signals[StopSignals.received])
            time.sleep(0.1)
        raise
