"""What wandb keeps offline, as its own reader has it; a resume has the same id; a server that does not answer."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.needs import needs
from support.runs import make
from toy_recipe import Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.loggers.wandb import WandB

pytestmark = needs("wandb")
BLOCK = 1 << 15  # of LevelDB's log format, in which wandb keeps records


def teardown() -> None:
    import wandb

    wandb.teardown()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch) -> Iterator[None]:
    """No key of this machine's user, and no process of wandb's that goes on."""
    monkeypatch.setattr(timeouts, "LOGGER_S", 120.0)  # wandb's process starts slowly on a busy machine
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    if "wandb" in sys.modules:
        teardown()


class Shows(Toy):
    def media(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"image": torch.zeros(3, 2, 4), "text": "1 < 2", "x": batch["x"][0]}


class Record(Callback):
    """What there was to write; the process ends at the checkpoint after `last`."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.found: dict[int, dict[str, float]] = {}

    def on_step_end(self, trainer) -> None:
        self.found[trainer.step] = dict(trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self.found[trainer.step] |= metrics

    def on_flush(self, trainer) -> None:
        if trainer.step == self.last:
            raise KeyboardInterrupt


def train(last: int = 0, mode: Any = "offline", **options: Any) -> Record:
    record = Record(last)
    callbacks = {"wandb": WandB("tests", mode=mode), "record": record}
    trainer = make(Shows(), callbacks, log_every_steps=1, validate_every=2, **options)
    (trainer.run_dir / "config.yaml").write_text("batch: 12\noptimizer: {lr: 0.05}\n")
    try:
        trainer.fit()
    finally:
        teardown()  # as at the end of a process: then all is written
    return record


def records(folder: Path) -> Iterator[Any]:
    """The records in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record as Stored

    (file,) = folder.glob("*.wandb")
    content, at, whole = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Stored.FromString(whole)
            whole = b""


def offline_runs() -> list[Path]:
    return sorted(Path("runs/r/wandb").glob("offline-run-*"))


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """The values by step and name; of media, the last of their parts."""
    found = {}
    for record in records(folder):
        if record.HasField("history"):
            step, items = 0, {}
            for item in record.history.item:
                *_, last = name = list(item.nested_key)
                step = json.loads(item.value_json) if name == ["_step"] else step
                if not name[0].startswith("_"):
                    items[name[0]] = json.loads(item.value_json)
                if last == "values":
                    items[".".join(name)] = items[name[0]]
            found[step] = items
    return found


def test_what_is_kept_offline(messages):
    record = train()
    (folder,) = offline_runs()
    found = history(folder)
    assert found.keys() == record.found.keys() == {1, 2, 3, 4}
    for step, numbers in record.found.items():
        media = {"image", "text", "x"} if step in (2, 4) else set()
        assert {name.split(".")[0] for name in found[step]} == numbers.keys() | media
        assert {name: found[step][name] for name in numbers} == pytest.approx(numbers)
    assert len(list(folder.rglob("image*.png"))) == len(list(folder.rglob("text*.html"))) == 2
    assert sum(found[2]["x.values"]) == 8
    (run,) = [record.run for record in records(folder) if record.HasField("run")][:1]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {"batch": 12, "optimizer.lr": 0.05}.items() <= config.items()
    assert (run.project, run.display_name) == ("tests", "r")
    assert [text for text in messages if text.startswith("wandb")] == [
        f"wandb       offline; wandb sync {folder} sends it"
    ]


@pytest.mark.slow
def test_a_resume_goes_on_in_the_same_run():
    with pytest.raises(KeyboardInterrupt):
        train(last=4)  # before the checkpoint of step 4
    train(resume="auto", max_steps=6)
    before, after = offline_runs()
    run_id = json.loads(Path("runs/r/wandb.json").read_text())["run_id"]
    assert run_id in before.name and run_id in after.name
    assert history(before).keys() == {1, 2, 3, 4} and history(after).keys() == {3, 4, 5, 6}
    assert history(before)[3]["train/loss"] == history(after)[3]["train/loss"]


def test_without_a_key_nothing_is_asked(messages):
    train(mode="online")
    assert history(offline_runs()[0]).keys() == {1, 2, 3, 4}
    assert "wandb: no API key is known (WANDB_API_KEY, or wandb login); the run is kept offline" in messages


@pytest.mark.slow
def test_a_server_that_does_not_answer(monkeypatch, messages):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("trainer.loggers.wandb.LOGGER_S", 2.0)
    train(mode="online")
    assert history(offline_runs()[0]).keys() == {1, 2, 3, 4}
    (told,) = [text for text in messages if text.startswith("wandb: ")]
    assert "connection refused; training continues, and the run is kept offline" in told


@pytest.mark.slow
def test_wandb_that_fails_later_ends_nothing(monkeypatch, messages):
    class Breaks(Callback):
        def on_step_end(self, trainer) -> None:
            sender = trainer.callbacks["wandb"].sender
            while trainer.step == 2 and sender.calls:
                pass
            if trainer.step == 2:
                teardown()  # as if its process had been killed

    trainer = make(callbacks={"wandb": WandB(mode="offline"), "z": Breaks()}, log_every_steps=1)
    trainer.fit()
    assert trainer.step == 4 and sum("this is left out" in text for text in messages) <= 1


def test_no_package(monkeypatch):
    monkeypatch.setattr("trainer.loggers.wandb.find_spec", lambda name: None)
    with refuses("callbacks.wandb", "'wandb>=0.20,<0.32'"):
        WandB()
