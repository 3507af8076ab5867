"""A dry run: two steps and a short validation in a temporary folder, which is removed afterwards."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from trainer.callback import Callback, Role
from trainer.config.options import Options
from trainer.errors import ConfigError
from trainer.log import log
from trainer.loggers.sender import SendingLogger

STEPS = BATCHES = 2  # training steps; batches of a validation
FOLDER = "echelon-dry-run"  # the run's folder, inside a temporary one


class DryRun(Callback):
    """Ends the run after two steps. `left_out` names the callbacks that would create a run on a server."""

    role = Role.OBSERVE

    def __init__(self, left_out: Iterable[str], batches: int) -> None:
        self.left_out, self.batches = ", ".join(left_out), batches

    def on_fit_start(self, trainer) -> None:
        log.info("dry run: %d steps, validations of %d batch(es); all files are temporary", STEPS, self.batches)
        if self.left_out:
            log.info("dry run: nothing is sent to a server, so %s is left out", self.left_out)

    def on_step_end(self, trainer) -> None:
        if trainer.step == STEPS:
            trainer.stop("dry_run")


def dried(options: Options, folder: Path) -> Options:
    """Return the options of a dry run whose files are in `folder`. An overfit run validates on its own batches."""
    if options.resume is not None:
        raise ConfigError(f"trainer.dry_run=true: makes a new run, and trainer.resume={options.resume}; leave one out")
    limits = options.limit_batches
    return replace(
        options,
        run_dir=str(folder / FOLDER),
        checkpoint=replace(options.checkpoint, dir=str(folder / "ckpt")),
        limit_batches=limits if options.overfit else replace(limits, validation=BATCHES),
        validate_every=None if options.validate_every is None else 1,
    )


class DryFolder:
    """A run's options and callbacks. A dry run gets a temporary folder, and no callbacks that send to a server.

    If a launcher has planned the dry run, its ranks already have the folder.
    """

    def __init__(self, options: Options, callbacks: Mapping[str, Callback]) -> None:
        self.options, self.callbacks, self.folder = options, callbacks, None
        if not options.dry_run:
            return
        sending = [name for name, callback in callbacks.items() if isinstance(callback, SendingLogger)]
        kept = {name: callback for name, callback in callbacks.items() if name not in sending}
        self.callbacks = {**kept, "dry_run": DryRun(sending, options.overfit or BATCHES)}
        if Path(options.run_dir or "").name != FOLDER:
            self.folder = tempfile.TemporaryDirectory(prefix="echelon-", ignore_cleanup_errors=True)
            self.options = dried(options, Path(self.folder.name))

    def close(self) -> None:
        if self.folder:
            self.folder.cleanup()
