"""Parses the arguments of tools: an invalid one is reported in one line, with the exit code of a wrong setting."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import CONFIG, ConfigError, printable, refuse_remote


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, without the usage text and exit code 2 on an error. Paths must be local."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert an argument. A URL given as a path ends the tool here, because a Path would print it as `s3:/`."""
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
