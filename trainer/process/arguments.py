"""Reads the arguments of tools: a wrong one is one line, and the exit code is that of a wrong setting."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import CONFIG, ConfigError, printable, refuse_remote


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which would print the usage and exit with 2. A path is one of this machine."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return an argument by its type. A URL where a path is due ends the tool: a Path would print it as `s3:/`."""
        if action.type is Path:
            name = next(iter(action.option_strings), str(action.metavar or action.dest.upper()))
            try:
                refuse_remote(name, arg_string)
            except ConfigError as error:
                print(f"echelon: {printable(str(error))}", file=sys.stderr)
                sys.exit(CONFIG)
        return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue] not in its stub

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {printable(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(CONFIG)
