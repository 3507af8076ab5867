"""Runs a script's `main` as a command: an error of the user's is one line, and a signal lets every `finally` run."""

import signal
import sys
from collections.abc import Callable

from trainer.errors import ConfigError, exit_code, message
from trainer.process.signals import handled_signals


def command(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with the code that it returns."""
    for number in handled_signals():
        signal.signal(number, stop)
    try:
        sys.exit(main())
    except ConfigError as error:
        print(message(error), file=sys.stderr)
        sys.exit(exit_code(error))


def stop(number: int, _: object) -> None:
    for each in handled_signals():
        signal.signal(each, signal.SIG_IGN)  # a second signal does not disturb the clean-up
    raise SystemExit(128 + number)
