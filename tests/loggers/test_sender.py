"""Calls to a server that is away wait, in order; the training neither waits nor ends."""

import threading

import pytest

from trainer import timeouts
from trainer.loggers import sender as module
from trainer.loggers.sender import Sender


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(timeouts, "LOGGER_PAUSE_S", 0.01)


class Server:
    """Away until it has been asked so many times."""

    def __init__(self, away: int) -> None:
        self.away, self.got = away, []

    def take(self, number: int) -> None:
        if self.away:
            self.away -= 1
            raise ConnectionError("refused\nby HOST")
        if number == 3:
            raise ValueError("3 is too much")
        self.got.append(number)


def send(server: Server, count: int) -> None:
    sender = Sender("mine", lambda error: isinstance(error, OSError))
    for number in range(count):
        sender.put(lambda number=number: server.take(number))
    sender.close()
    sender.thread.join(10)
    assert not sender.thread.is_alive()


def test_calls_come_in_order_once_the_server_answers(messages):
    send(server := Server(3), 6)
    assert server.got == [0, 1, 2, 4, 5]
    assert messages == [
        "mine: refused by HOST; training continues, and writes wait until there is an answer",
        "mine: answers again",
        "mine: 3 is too much; training continues, and this is left out",
    ]


def test_a_server_that_stays_away(monkeypatch, messages):
    monkeypatch.setattr(timeouts, "LOGGER_S", 0.1)
    send(server := Server(10**9), 6)
    assert server.got == []
    assert messages[1:] == ["mine: 6 writes did not arrive before the end of the run"] and "HOST" in messages[0]


def test_a_server_that_never_answers(monkeypatch, messages):
    """A call that hangs delays the end of the run by a limit, and nothing before."""
    monkeypatch.setattr(timeouts, "LOGGER_S", 0.1)
    answer, sender = threading.Event(), Sender("mine", lambda error: False)
    sender.put(answer.wait)
    sender.put(lambda: None)
    sender.close()
    assert messages == ["mine: 2 writes did not arrive before the end of the run"]
    answer.set()
    sender.thread.join(10)


def test_memory_is_bounded(monkeypatch, messages):
    monkeypatch.setattr(module, "MOST", 3)
    answer, got, sender = threading.Event(), [], Sender("mine", lambda error: False)
    sender.put(answer.wait)
    for number in range(6):
        sender.put(lambda number=number: got.append(number))
    answer.set()
    sender.close()
    assert got == [0, 1] and messages == ["mine: more than 3 writes wait; new ones are lost"]


def test_without_a_call_there_is_no_thread():
    sender = Sender("mine", lambda error: False)
    sender.close()
    assert sender.thread.ident is None
