"""A logger of one's own gets the numbers of logged steps and of validations, on rank 0."""

from support.ranks import run_ranks
from support.runs import make

from trainer.loggers.logger import Logger
from trainer.process.environment import Place


class Kept(Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[int, list[str]]] = []

    def write(self, trainer, numbers: dict[str, float]) -> None:
        self.lines.append((trainer.step, sorted(name for name in numbers if name in ("train/loss", "val/loss"))))


def train(place: Place) -> list[tuple[int, list[str]]]:
    logger = Kept()
    make(callbacks={"kept": logger}, place=place, max_steps=5, log_every_steps=2, validate_every=3).fit()
    return logger.lines


def test_numbers_of_logged_steps_and_of_validations_on_rank_0(tmp_path) -> None:
    first, other = run_ranks(2, train)
    train_loss, val_loss = ["train/loss"], ["val/loss"]
    assert first == [(2, train_loss), (3, val_loss), (4, train_loss), (5, train_loss), (5, val_loss)]
    assert other == []
