"""A real MLflow server has a run's numbers, media and settings, of a resume, too; it may be away for a while."""

import contextlib
import http.server
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import environment
from support.messages import refuses
from support.needs import needs
from support.runs import make
from toy_recipe import Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.loggers.mlflow import MLflow, valid

pytestmark = needs("mlflow")

SERVER = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}  # files start soonest


@pytest.fixture(autouse=True)
def silent(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "tests")  # mlflow sets it


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Link(socketserver.ThreadingTCPServer):
    """A link to a port of this machine, which can be cut."""

    daemon_threads = True
    cut = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Pipe)
        self.port, self.uri = port, f"http://127.0.0.1:{self.server_address[1]}"


class Pipe(socketserver.BaseRequestHandler):
    server: Link

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port)) as other:
            ways = {self.request: other, other: self.request}
            while not self.server.cut:
                for end in select.select(list(ways), [], [], 0.05)[0]:
                    if not (content := end.recv(65536)):
                        return
                    ways[end].sendall(content)


@contextlib.contextmanager
def linked(server: str) -> Iterator[Link]:
    with Link(int(server.rpartition(":")[2])) as link:
        threading.Thread(target=link.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield link
        link.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of an MLflow server in a folder of its own."""
    pytest.importorskip("alembic")
    pytest.importorskip("flask")
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", "./runs", "--artifacts-destination", "files"]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words], cwd=folder, env=environment(**SERVER), stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until, uri = time.monotonic() + 120, f"http://127.0.0.1:{port}"
        while not answers(f"{uri}/health"):
            assert time.monotonic() < until and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


class Shows(Toy):
    def media(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"an image": torch.zeros(1, 2, 3), "text": "words", "x": batch["x"][0]}


class Record(Callback):
    """What there was to write; the process ends at the checkpoint after `last`."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.found: dict[str, dict[int, float]] = {}

    def on_step_end(self, trainer) -> None:
        self._keep(trainer.step, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._keep(trainer.step, metrics)

    def _keep(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.found.setdefault(name, {})[step] = value

    def on_flush(self, trainer) -> None:
        if trainer.step == self.last:
            raise KeyboardInterrupt


def train(uri: str, last: int = 0, **options: Any) -> Record:
    record = Record(last)
    callbacks = {"mlflow": MLflow(uri, "tests"), "record": record}
    trainer = make(Shows(), callbacks, log_every_steps=1, validate_every=2, **options)
    (trainer.run_dir / "config.yaml").write_text(f"batch: 12\nmax: {trainer.options.max_steps}\n")
    trainer.fit()
    return record


def run_id() -> str:
    return json.loads(Path("runs/r/mlflow.json").read_text())["run_id"]


def client(server: str) -> Any:
    from mlflow.tracking.client import MlflowClient

    return MlflowClient(server)


def history(server: str, name: str) -> list[tuple[int, float]]:
    found = client(server).get_metric_history(run_id(), name)
    return sorted((metric.step, metric.value) for metric in found)


@pytest.mark.slow
def test_the_server_has_the_run(tmp_path, server, messages):
    record = train(server)
    assert [text for text in messages if "mlflow" in text] == [f"mlflow      run {run_id()} of {server}"]
    assert {"train/loss", "train/lr", "val/loss"} <= record.found.keys()
    for name, values in record.found.items():
        assert history(server, name) == sorted(values.items()), name
    known = client(server)
    run = known.get_run(run_id())
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    assert run.data.params == {"batch": "12", "max": "4"}
    assert [file.path for file in known.list_artifacts(run_id(), "an image")] == [
        f"an image/step-0000000{n}.png" for n in (2, 4)
    ]
    folder = Path(known.download_artifacts(run_id(), "x", str(tmp_path)))
    assert sum(json.loads((folder / "step-00000002.json").read_text())["counts"]) == 8


@pytest.mark.slow
def test_a_resume_goes_on_in_the_same_run(tmp_path, server):
    with pytest.raises(KeyboardInterrupt):
        train(server, last=4)  # before the checkpoint of step 4
    known, before = client(server), run_id()
    assert known.get_run(before).info.status == "FAILED"
    train(server, resume="auto", max_steps=6)
    run = known.get_run(run_id())
    assert run_id() == before and run.info.status == "FINISHED"
    assert [step for step, _ in history(server, "train/loss")] == [1, 2, 3, 3, 4, 4, 5, 6]
    assert dict(history(server, "train/loss")).keys() == set(range(1, 7))
    assert run.data.params["max"] == "4" and run.data.tags["resumed.max"] == "6"


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(tmp_path, monkeypatch, server, messages):
    """Away after step 1, back after step 3: every number arrives, and the training has not waited."""
    monkeypatch.setattr(timeouts, "LOGGER_PAUSE_S", 0.1)

    class Cuts(Callback):
        def on_step_end(self, trainer) -> None:
            sender = trainer.callbacks["mlflow"].sender
            if trainer.step == 1:
                while sender.calls:
                    time.sleep(0.01)
                link.cut = True
            if trainer.step == 3:
                while "away" not in sender.troubles:
                    time.sleep(0.01)
                link.cut = False

    with linked(server) as link:
        make(callbacks={"mlflow": MLflow(link.uri, "tests"), "z": Cuts()}, log_every_steps=1).fit()
    assert [step for step, _ in history(server, "train/loss")] == [1, 2, 3, 4]
    told = [text for text in messages if text.startswith("mlflow:")]
    assert len(told) == 2 and "training continues, and writes wait" in told[0] and told[1] == "mlflow: answers again"


@pytest.mark.slow
def test_no_server(tmp_path, monkeypatch, messages):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # else the thread would outlive the test
    monkeypatch.setattr(timeouts, "LOGGER_S", 0.1)
    callback = MLflow(f"http://127.0.0.1:{free_port()}")
    trainer = make(callbacks={"mlflow": callback}, log_every_steps=1)
    trainer.fit()
    assert trainer.step == 4 and "mlflow: 7 writes did not arrive before the end of the run" in messages
    callback.sender.thread.join(10)
    assert not callback.sender.thread.is_alive()


def test_no_address(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with refuses("callbacks.mlflow.uri=null", "MLFLOW_TRACKING_URI", "callbacks.mlflow.uri=http"):
        MLflow()


def test_no_package(monkeypatch):
    monkeypatch.setattr("trainer.loggers.mlflow.find_spec", lambda name: None)
    with refuses("callbacks.mlflow", "'mlflow-skinny>=3.5,<4'"):
        MLflow("http://127.0.0.1")


class Stranger(http.server.BaseHTTPRequestHandler):
    """A server that names a folder of the client's machine for its files."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        run = {"info": {"run_id": "a" * 32, "experiment_id": "1", "status": "RUNNING", "artifact_uri": self.server.uri}}
        about = {"experiment": {"experiment_id": "1", "name": "tests"}, "run": run, "run_info": run["info"]}
        content = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("scheme", ["file://{}", "{}", "runs:/{}"])
def test_no_server_chooses_a_folder_of_this_machine(scheme, tmp_path, messages):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        stranger.uri = scheme.format(tmp_path / "victim")
        threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        train(f"http://127.0.0.1:{stranger.server_address[1]}")
        stranger.shutdown()
    assert not (tmp_path / "victim").exists()
    told = [text for text in messages if "which would be a place of this machine" in text]
    assert len(told) == 1 and "--artifacts-destination FOLDER" in told[0]


def test_names_of_files_stay_names():
    assert [valid(name) for name in ("a b/c", "../x", "/x", "a//b", ".", "a?b")] == [
        "a b/c", "__/x", "_/x", "a/_/b", "_", "a_b",
    ]  # fmt: skip
