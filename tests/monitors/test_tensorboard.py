"""What TensorBoard itself reads back: the scalars, and the config as text; after a resume each step once."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.tensorboard import TensorBoard
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Record(Callback):
    """What there was to write; stops at `last`, with what came after the checkpoint of step 2 already written."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.numbers: dict[str, dict[int, float]] = {}

    def on_step_end(self, trainer) -> None:
        self._keep(trainer, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._keep(trainer, metrics)

    def _keep(self, trainer, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.numbers.setdefault(name, {})[trainer.step] = value

    def on_flush(self, trainer) -> None:
        if trainer.step == self.last:
            raise KeyboardInterrupt


def run(last: int, resume: str | None) -> Record:
    record = Record(last)
    trainer = Trainer(
        Toy(),
        {"tensorboard": TensorBoard(), "record": record},
        batch=12,
        options=Options(
            max_steps=6, log_every_steps=1, validate_every=3, run_dir="runs/r", resume=resume,
            checkpoint=CheckpointOptions(every_steps=2),
        ),
        data=DataOptions(workers=0),
        place=Place(),
    )  # fmt: skip
    (trainer.run_dir / "config.yaml").write_text("batch: 12\n")
    trainer.fit()
    return record


def read() -> EventAccumulator:
    return EventAccumulator("runs/r/tensorboard", size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(events: EventAccumulator) -> dict[str, dict[int, float]]:
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_the_scalars_and_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = run(0, None)
    events = read()
    written = scalars(events)
    assert written.keys() == record.numbers.keys() == {"train/loss", "train/lr", "train/grad_norm", "val/loss"}
    for name, values in record.numbers.items():
        assert written[name] == pytest.approx(values, rel=1e-6)  # stored as float32
    assert list(written["train/loss"]) == [1, 2, 3, 4, 5, 6] and list(written["val/loss"]) == [3, 6]
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\nbatch: 12\n```"


def test_a_resume_hides_what_it_does_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(4, None)  # where the checkpoint of step 4 would be written
    assert list(scalars(read())["train/loss"]) == [1, 2, 3, 4]
    run(0, "auto")
    events = read()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val/loss")] == [3, 6]
    assert len(list(Path("runs/r/tensorboard").iterdir())) == 2
