"""Reads the arguments of tools: a wrong one is one line, and the exit code is that of a wrong setting."""

import argparse
import sys
from typing import NoReturn

from trainer.errors import CONFIG, printable


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which would print the usage and exit with 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {printable(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(CONFIG)
