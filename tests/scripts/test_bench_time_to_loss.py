"""scripts/bench_time_to_loss.py: when a loss is reached, ratios and goals by hand, the plot, and a tiny run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.cli import environment
from support.network import namespaces, needs_cluster

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from bench_time_to_loss import Record, Settings, run
from comm_turns import Failed
from loss_plot import plot
from loss_rank import CURVE, METHODS, timed
from loss_table import Outcome, reached

from trainer.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_time_to_loss.py"
DDP = [(10, 8.0, 100.0), (20, 6.0, 200.0), (30, 5.0, 300.0)]
FASTER = [(10, 7.0, 11.0), (20, 4.5, 22.0), (30, 4.0, 33.0)]  # at DDP's final 5.0 at step 18
WORSE = [(10, 8.0, 10.0), (20, 6.0, 20.0), (30, 5.1, 30.0)]
LONGER = [(11, 8.0, 11.0), (22, 6.0, 22.0), (33, 4.0, 33.0)]  # at 5.0 at step 27.5


@pytest.mark.parametrize(
    ("loss", "step"), [(8.5, 10), (8.0, 10), (7.0, 15.0), (6.5, 17.5), (6.0, 20.0), (5.25, 27.5), (4.9, None)]
)
def test_a_loss_is_reached_on_the_line_between_validations(loss: float, step: float | None) -> None:
    assert reached(DDP, loss) == step


def test_the_first_time_counts() -> None:
    assert reached([(1, 5.0, 1.0), (2, 3.0, 2.0), (3, 6.0, 3.0), (4, 2.0, 4.0)], 4.0) == 1.5


def outcome(**changed: Any) -> Outcome:
    """In the second round all is twice as slow, but `dgc`."""
    curves = {"ddp": DDP, "dgc": FASTER, "int8": WORSE, "onebit_adam": FASTER}
    seconds = {"": [1.0, 2.0, 1.0], "ddp": [10.0, 20.0, 10.0], "dgc": [1.5, 1.5, 1.5], "int8": [2.0, 4.0, 2.0]}
    values = {"curves": curves, "seconds": {**seconds, "onebit_adam": [1.0, 2.0, 1.0]}, "plain": {"onebit_adam": 5}}
    return Outcome(**{"title": "a <title>", "steps": 30, **values, **changed})


def test_table_by_hand() -> None:
    rows = {row["method"]: row for row in outcome().table()}
    assert len({tuple(row) for row in rows.values()}) == 1  # the same columns
    ddp, dgc, int8, onebit_adam, free = rows.values()
    assert (ddp["wall s"], ddp["DDP's loss at step"], ddp["after s"], ddp["/ free"]) == (300.0, 30.0, 300.0, 10.0)
    assert (dgc["final loss"], dgc["/ DDP's"], dgc["s a step"], dgc["wall s"]) == (4.0, 0.8, 1.5, 45.0)
    assert (dgc["DDP's loss at step"], dgc["after s"]) == (18.0, 27.0)
    assert dgc["/ free"] == 0.9  # in the rounds: 27 / 30, 27 / 60, 27 / 30
    assert int8["DDP's loss at step"] == "never: 2 % above" and int8["/ free"] == ""
    assert int8["/ DDP's"] == pytest.approx(1.02)
    assert onebit_adam["wall s"] == 5 * 10.0 + 25 * 1.0 and onebit_adam["after s"] == 5 * 10.0 + 13 * 1.0
    assert [row["steps"] for row in rows.values()] == [30] * 5
    assert (free["method"], free["s a step"], free["wall s"]) == ("no communication", 1.0, 30.0)


def test_a_method_may_train_for_more_steps_than_ddp() -> None:
    _, row, free = outcome(curves={"ddp": DDP, "dgc": LONGER}).table()
    assert (row["steps"], row["wall s"], row["s a step"], row["/ DDP's"]) == (33, 49.5, 1.5, 0.8)
    assert (row["DDP's loss at step"], row["after s"]) == (27.5, 41.25)
    assert row["/ free"] == 41.25 / 30 and free["steps"] == 30


def test_goals_by_hand() -> None:
    goals = outcome().goals()
    assert [(goal.name.split(",")[0], goal.value, goal.met) for goal in goals] == [
        ("dgc", 0.9, True),
        ("dgc", 0.8, True),
        ("int8", pytest.approx(1.02), False),
    ]
    slow = outcome(seconds={"": [1.0], "ddp": [10.0], "dgc": [2.2]}).goals()
    assert (slow[0].value, slow[0].met) == (pytest.approx(1.32), False)


def test_on_the_real_link_the_times_are_the_curves_own() -> None:
    real = outcome(real=True, seconds={"": [1.0, 3.0]})
    rows = {row["method"]: row for row in real.table()}
    assert rows["ddp"]["wall s"] == 300.0 and rows["dgc"]["wall s"] == 33.0
    assert rows["dgc"]["after s"] == pytest.approx(19.8)  # step 18, between 11 s at 10 and 22 s at 20
    assert rows["dgc"]["/ free"] == pytest.approx((19.8 / 30 + 19.8 / 90) / 2)
    assert real.walls("ddp", 5) == [50.0, 50.0]


def test_the_plot_is_xml_with_a_line_and_a_word_for_each_method() -> None:
    it = outcome()
    root = ElementTree.fromstring(plot(it.title, it.lines(), it.free_s(), it.loss("ddp")))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg" and root.findtext(f"{svg}title") == "a <title>"
    words = {text.text for text in root.iter(f"{svg}text")}
    assert {*it.curves, "seconds of training", "validation loss", "100"} <= words
    lines = [
        [tuple(map(float, point.split(","))) for point in each.attrib["points"].split()]
        for each in root.iter(f"{svg}polyline")
    ]
    assert list(map(len, lines)) == [3, 3, 3, 3]
    for line in lines:
        assert all(60 <= x <= 670 and 20 <= y <= 410 for x, y in line)
        assert line == sorted(line), "later is to the right, and a smaller loss is below"
    ddp, dgc, *_ = lines
    assert ddp[0][0] - dgc[0][0] == pytest.approx(ddp[1][0] - dgc[1][0], abs=0.2), "the same factor is the same way"


def test_every_method_can_be_built() -> None:
    for method in METHODS.values():
        for row in (method.row, method.timed or method.row):
            assert row.build().keys() == row.callbacks.keys()
    assert timed("").run == "alone" and timed("ddp").run == "ddp"


def test_timed_steps_are_those_after_the_warm_up_and_the_others_count_as_ddp() -> None:
    method = METHODS["onebit_adam"]
    warm_ups = [row.build()["onebit_adam"].warmup_steps for row in (method.row, timed("onebit_adam"))]
    assert warm_ups[0] == method.plain and warm_ups[1] < timed("onebit_adam").warm


class Fake:
    """Stands for the ranks: the curve of a method is told from its name; bf16 fails in training, int8 when timed."""

    asked: list[tuple[str, str]] = []

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.folder = folder
        self.asked.clear()

    def turn(self, model: str, row: str, rate: str, steps: int, *_: Any) -> dict[str, float]:
        self.asked.append((row, rate))
        if row in ("train bf16", "time int8"):
            raise Failed("rank 1: ended with code -11")
        if row.startswith("train"):
            (self.folder / CURVE).write_text(json.dumps([[steps, len(row), 1.0]]))
        return {"seconds": 0.5, "sent": 0.0}


class Nowhere:
    def __init__(self, hosts: int) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_second_run_trains_what_is_missing_and_a_failure_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench_time_to_loss.Ranks", Fake)
    monkeypatch.setattr("bench_time_to_loss.Hosts", Nowhere)
    file, settings, names = tmp_path / "out.json", Settings("tiny", 7, False), ["ddp", "bf16", "int8"]
    seconds, failures = run(settings, names, 2, Record(file, settings))
    slow, free = "100mbit", "unlimited"
    assert Fake.asked == [
        ("train ddp", free), ("train bf16", free), ("train int8", free),
        ("time ", slow), ("time ddp", slow), ("time int8", slow), ("time ddp", slow), ("time ", slow),
    ]  # fmt: skip
    assert seconds == {"": [0.5, 0.5], "ddp": [0.5, 0.5]}
    assert [failure["method"] for failure in failures] == ["bf16", "int8"]
    again = Record(file, settings)
    assert again.curves == {"ddp": [[7, 9, 1.0]], "int8": [[7, 10, 1.0]]}
    run(settings, [*names, "dgc", "overlap+powersgd-longer"], 1, again)
    trained = ["train bf16", "train dgc", "train overlap+powersgd-longer"]
    assert [row for row, _ in Fake.asked if row.startswith("train")] == trained
    assert again.curves["dgc"][-1][0] == 7 and again.curves["overlap+powersgd-longer"][-1][0] == 8  # 7.7
    with pytest.raises(ConfigError, match=r"^--json .*out\.json: is of .*'steps': 7.*, not of .*'steps': 8"):
        Record(file, Settings("tiny", 8, False))


@needs_cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tiny_run(tmp_path: Path) -> None:
    before, file, svg = namespaces(), tmp_path / "out.json", tmp_path / "out.svg"
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--steps", "16", "--rounds", "1"]
    command += ["--methods", "local_sgd+int8", "--json", str(file), "--svg", str(svg)]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["curves"].keys() == {"ddp", "local_sgd+int8"} and written["failures"] == []
    for curve in written["curves"].values():
        steps, losses, seconds = zip(*curve)
        assert list(steps) == list(range(1, 17)) and list(seconds) == sorted(seconds) and seconds[0] > 0
        assert abs(losses[0] - 7.6) < 0.5 and losses[-1] < losses[0] - 0.1  # ln 2048 is 7.62: nothing is known at first
    rows = {row["method"]: row for row in written["rows"]}
    assert rows["ddp"]["s a step"] > 1.5 * 4 * 686_000 / 12.5e6  # as slow as the link
    assert rows["no communication"]["wall s"] < rows["local_sgd+int8"]["wall s"] < rows["ddp"]["wall s"]
    assert rows["ddp"]["/ DDP's"] == 1.0 and len(written["goals"]) == 1
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out.svg", "cache"}
    assert namespaces() == before
