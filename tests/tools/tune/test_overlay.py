"""The result: a file that Hydra composes to the config that was measured, and that knows its machine."""

from pathlib import Path

import pytest
from support.messages import refuses

from trainer.config.check import check
from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.config.tuned import Tuned
from trainer.cost.machine import Link
from trainer.cost.workload import Choice
from trainer.errors import ConfigError
from trainer.tools.tune.configs import merge
from trainer.tools.tune.overlay import file_name, link_class, overlay, write

TUNED = Tuned("cpu", None, 2, 1, "1 Gbit/s")
WORDS = ["recipe=bert_tiny", "batch=64"]


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(Choice({"overlap": {}}, {"trainer.ddp.bucket_mib": 5.0}), marks=pytest.mark.slow),
        Choice({"hierarchical": {"ranks_per_node": 2}, "grad_compress": {"codec": "int8"}}, {}),
        Choice({"shard": {"stage": 3}, "activation_checkpoint": {}}, {"nccl.algo": "allreduce:Tree"}),
        pytest.param(
            Choice({"memory": {"snapshot": True}}, {"micro_batch": 8, "accumulate": None, "data.workers": 4}),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), ["+callbacks=[ema]"]])
def test_the_overlay_composes_to_what_was_measured(choice: Choice, more: list[str], tmp_path: Path) -> None:
    words = [*WORDS, *more]
    today = compose(words, [CONF])[0].config
    text = overlay(today, choice, TUNED, ["0.9 s before, 0.6 s after", "odd\nline"])
    path = write(tmp_path, "mine", text)
    assert path == tmp_path / "tuned" / "mine.yaml" and "# odd?line\n" in path.read_text()
    for word in ("+tuned=mine", "tuned=mine"):
        made = compose(["--config-dir", str(tmp_path), *words, word], [CONF, tmp_path])[0].config
        check(made)
        assert made.pop("tuned") == {"cpu": "cpu", "gpu": None, "ranks": 2, "ranks_per_node": 1, "link": "1 Gbit/s"}
        assert made == merge(today, choice)


def test_a_name_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with refuses("tuned=other", "--config-dir", "FOLDER"):
        compose(["--config-dir", str(tmp_path), *WORDS, "+tuned=other"], [CONF, tmp_path])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("")
    with pytest.raises(ConfigError, match=r"mine.yaml: can't be written: .*; give another --config-dir"):
        write(tmp_path, "mine", "")


def test_names_and_classes() -> None:
    assert file_name("group/my recipe") == "my-recipe" and file_name("") == "run"
    rates = {
        0.996e9: "1 Gbit/s",
        95e6: "100 Mbit/s",
        11e9: "10 Gbit/s",
        30e9: "40 Gbit/s",
        1e13: "more than 800 Gbit/s",
    }
    assert {rate: link_class(Link(0.0, rate / 8, 0.0), 2) for rate in rates} == rates
    assert link_class(Link(0.0, 1e12, 0.0), 1) == "none"
