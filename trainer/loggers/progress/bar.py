"""Draws the progress bar on a terminal with rich, whose import takes a tenth of a second."""

from collections.abc import Callable
from typing import Any

from rich import progress
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.loggers.progress.line import Moment, arrange

# Takes the seconds since the bar began and those that are left, None if not known.
Look = Callable[[float, float | None], Moment]


class Bar(progress.ProgressColumn):
    """A progress bar in the last line of the terminal, redrawn 10 times a second by a thread.

    Args:
        look: Returns the present moment of the run; called in the thread.
        last: The last step; None: the run has no end.
        step: The step at which this process begins.
    """

    def __init__(self, look: Look, last: int | None, step: int) -> None:
        super().__init__()
        self.look = look
        self.drawn = progress.Progress(self, transient=True)
        self.task = self.drawn.add_task("", total=last, completed=step)
        self.drawn.start()

    @property
    def console(self) -> Console:
        return self.drawn.console

    def advance(self, step: int) -> None:
        """Update the estimate of the remaining time."""
        self.drawn.update(self.task, completed=step)

    def note(self, step: int, numbers: dict[str, float]) -> None:
        """Do nothing: a terminal has no room for curves."""

    def stop(self, step: int) -> None:
        self.drawn.stop()

    def render(self, task: progress.Task) -> Table:
        moment = self.look(task.elapsed or 0.0, task.time_remaining)
        head, columns, tail = arrange(moment, self.drawn.console.width)
        cells: list[Any] = [Text(text, no_wrap=True, overflow="crop") for text in (head, tail)]
        if columns and moment.last:
            cells.insert(1, ProgressBar(total=moment.last, completed=moment.step, width=columns))
        line = Table.grid(padding=(0, 1))
        line.add_row(*cells)
        return line
