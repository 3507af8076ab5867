"""What TensorBoard itself reads back: scalars, media, settings, the config; after a resume each step once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data
from tensorboard.util.tensor_util import make_ndarray
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.loggers.tensorboard import TensorBoard
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


class Shows(Toy):
    def media(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"image": torch.full((3, 2, 4), 255, dtype=torch.uint8), "text": "a *word*", "x": torch.arange(128.0)}


def run(last: int, resume: str | None, recipe: Any = None, config: str = "batch: 12\n") -> Record:
    record = Record(last)
    trainer = Trainer(
        recipe or Toy(),
        {"tensorboard": TensorBoard(), "record": record},
        batch=12,
        options=Options(
            max_steps=6, log_every_steps=1, validate_every=3, run_dir="runs/r", resume=resume,
            checkpoint=CheckpointOptions(every_steps=2),
        ),
        data=DataOptions(workers=0),
        place=Place(),
    )  # fmt: skip
    (trainer.run_dir / "config.yaml").write_text(config)
    trainer.fit()
    return record


def read() -> EventAccumulator:
    return EventAccumulator("runs/r/tensorboard", size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(events: EventAccumulator) -> dict[str, dict[int, float]]:
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_the_scalars_and_the_config(tmp_path):
    record = run(0, None)
    events = read()
    written = scalars(events)
    assert written.keys() == record.numbers.keys() == {"train/loss", "train/lr", "train/grad_norm", "val/loss"}
    for name, values in record.numbers.items():
        assert written[name] == pytest.approx(values, rel=1e-6)  # stored as float32
    assert list(written["train/loss"]) == [1, 2, 3, 4, 5, 6] and list(written["val/loss"]) == [3, 6]
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\nbatch: 12\n```"


def test_settings_as_hparams(tmp_path):
    """As the plugin itself reads them. A resume is the same trial, also with another setting."""
    with pytest.raises(KeyboardInterrupt):
        run(4, None)
    run(0, "auto", config="{batch: 12, recipe: {width: 1.5, name: x}}")
    found = []
    for file in sorted(Path("runs/r/tensorboard").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
        found.append(parse_session_start_info_plugin_data(content))
    assert {name: value.number_value for name, value in found[0].hparams.items()} == {"batch": 12}
    assert {name: value.number_value or value.string_value for name, value in found[1].hparams.items()} == {
        "batch": 12, "recipe.width": 1.5, "recipe.name": "x"
    }  # fmt: skip
    assert found[0].group_name == found[1].group_name == "runs/r"  # which the table shows as the trial's ID


def test_media(tmp_path):
    run(0, None, Shows())
    events = read()
    assert [event.step for event in events.Images("image")] == [3, 6]
    image = events.Images("image")[0]
    assert (image.width, image.height) == (4, 2) and image.encoded_image_string.startswith(b"\x89PNG")
    assert make_ndarray(events.Tensors("text/text_summary")[0].tensor_proto).item() == b"a *word*"
    histogram = events.Histograms("x")[0].histogram_value
    assert histogram.num == 128 and sum(histogram.bucket) == 128 and histogram.max == 127
    assert list(histogram.bucket_limit[:2]) == [0.0, 127 / 64] and list(histogram.bucket[:2]) == [0.0, 2.0]


def test_a_resume_hides_what_it_does_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(4, None)  # where the checkpoint of step 4 would be written
    assert list(scalars(read())["train/loss"]) == [1, 2, 3, 4]
    run(0, "auto")
    events = read()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val/loss")] == [3, 6]
    assert len(list(Path("runs/r/tensorboard").iterdir())) == 2
