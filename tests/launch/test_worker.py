"""A rank whose peer failed, and the report of one that fails."""

import json
import threading
import time

import pytest
from torch.distributed import DistError

from trainer.launch import worker
from trainer.process.signals import StopSignals


class Ended(BaseException):
    """In place of the end of the process."""


def end(code: int) -> None:
    raise Ended(code)


def fail(*args: object) -> int:
    raise DistError("Connection closed by peer")


def test_a_launcher_that_asks_a_waiting_rank_to_end_is_heeded_at_once(monkeypatch):
    monkeypatch.setattr(worker, "train", fail)
    monkeypatch.setattr(worker.os, "_exit", end)
    monkeypatch.setattr(StopSignals, "received", "")
    began = time.monotonic()
    threading.Timer(0.3, lambda: setattr(StopSignals, "received", "SIGTERM")).start()
    with pytest.raises(Ended) as ended:
        worker.train_or_wait({}, "run", [])
    assert ended.value.args == (128 + 15,) and 0.2 < time.monotonic() - began < 6


def test_the_first_error_is_reported_before_any_clean_up(monkeypatch, tmp_path):
    """What clean-up fails with comes later, and is no cause."""
    monkeypatch.setenv("ECHELON_ERROR_FILE", str(tmp_path / "error-0.json"))
    worker.report(ValueError("first"))
    worker.report(RuntimeError("second"))
    told = json.loads((tmp_path / "error-0.json").read_text())
    assert told["text"] == "ValueError: first" and not told["in_collective"]


def test_a_report_that_cannot_be_written_is_shown(monkeypatch, tmp_path, capsys):
    """The disk that it would be on may be full, and the reason why the rank failed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ECHELON_ERROR_FILE", str(tmp_path / "file" / "error-0.json"))
    worker.report(ValueError("first"))
    assert capsys.readouterr().err == "ValueError: first\n"


def test_an_error_of_gloo_is_one_of_a_collective():
    """Gloo closes all pairs at a time-out, and operations that others then wait for name no file of gloo's."""
    texts = ("[../third_party/gloo/gloo/transport/tcp/pair.cc:538] reset", "Application timeout caused pair closure")
    assert all(worker.in_collective(RuntimeError(text)) for text in texts)
    assert not worker.in_collective(RuntimeError("trouble"))
