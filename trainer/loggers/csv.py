"""Writes `metrics.csv`, a row for each logged step and each validation, for spreadsheets and pandas."""

import csv
import io
from typing import Any

from trainer.context import Context
from trainer.files import Appended, write_whole
from trainer.log import log
from trainer.loggers.logger import Logger


class CSV(Logger):
    """Writes metrics.csv on rank 0. A new metric adds a column, for which the file is rewritten.

    A resume drops the rows of later steps. A number that is not finite is `nan`, `inf` or `-inf`.
    """

    def __init__(self) -> None:
        self.file: Appended | None = None
        self.columns: list[str] = []
        self.full = False
        self.last: int | None = None  # the step at which the run begins, until the first row is written

    def on_fit_start(self, trainer) -> None:
        if trainer.rank == 0:
            self.file, self.last = Appended(trainer.run_dir / "metrics.csv"), trainer.step

    def on_fit_end(self, trainer) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, trainer: Context, numbers: dict[str, float]) -> None:
        assert self.file
        if self.last is not None:
            self._resume(self.last)
        row = self.row(trainer, numbers)
        columns = [*self.columns, *(name for name in row if name not in self.columns)]
        if len(columns) > len(self.columns):
            self._replace(columns, self._lines()[1:])
        self.file.write(text([[row.get(name, "") for name in self.columns]]).encode())

    def _resume(self, last: int) -> None:
        """Drop rows after step `last`, and an incomplete last line of a killed process."""
        self.last, lines = None, self._lines()
        self.columns, rows = lines[0] if lines else [], lines[1:]
        if lines:
            self._replace(self.columns, [row for row in rows if row[0].isdigit() and int(row[0]) <= last])

    def _lines(self) -> list[list[str]]:
        """Return the complete lines; a killed process may leave a partial one."""
        assert self.file
        self.file.close()
        try:
            whole = self.file.path.read_bytes().decode(errors="replace").rpartition("\n")[0]
        except FileNotFoundError:
            return []
        return [line for line in csv.reader(io.StringIO(whole)) if line]

    def _replace(self, columns: list[str], rows: list[list[str]]) -> None:
        """Rewrite the file. While the disk is full, rows keep the old columns."""
        assert self.file
        try:
            padded = [row + [""] * (len(columns) - len(row)) for row in rows]
            write_whole(self.file.path, text([columns, *padded]).encode())
            self.columns = columns
        except OSError as error:
            if not self.full:
                log.warning("%s: can't be rewritten: %s; new columns wait", self.file.path, error.strerror)
            self.full = True
            if not self.columns:
                self.columns = columns
                self.file.write(text([columns]).encode())


def text(rows: list[list[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
