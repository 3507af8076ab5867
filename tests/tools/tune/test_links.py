"""Links on real ranks, over loopback and over links of a known rate."""

import json
import sys
from typing import Any

import pytest
from support.configs import toy_config
from support.network import Cluster, needs_cluster
from support.ranks import run_ranks

from trainer.process.environment import Place
from trainer.tools.tune.links import codecs_of, make_machine, measure_links


def measure(place: Place, codecs: bool) -> dict[str, Any]:
    return measure_links(place, "cpu", "gloo", 60, codecs_of(toy_config(), place, True) if codecs else {})


@pytest.mark.slow
def test_ranks_of_a_machine_measure_their_links_and_codecs() -> None:
    answers = run_ranks(2, measure, True)
    machine = make_machine(json.loads(json.dumps(answers)), Place(0, 2, 0, 2))
    assert {answer["backend"] for answer in answers} == {"gloo"}
    assert machine.inside == machine.across and machine.inside.bytes_per_s > 1e6 and machine.memory_bytes is None
    assert 0 < machine.cores_per_rank < 1000 and machine.codecs.keys() == {
        "none",
        "bf16",
        "fp16",
        "int8",
        "topk",
        "powersgd",
    }
    assert all(cost.encode_s_per_byte > 0 for cost in machine.codecs.values())


@pytest.mark.slow
def test_two_levels() -> None:
    answers = run_ranks(4, measure_two_levels)
    assert answers[0].keys() == {"inside", "across", "all"} and all(answer == answers[0] for answer in answers)


def measure_two_levels(place: Place) -> dict[str, Any]:
    pair = Place(place.rank, 4, place.rank % 2, 2, place.store, "test")
    return measure_links(pair, "cpu", "gloo", 60, {})["levels"]


SCRIPT = (
    "import json, os; from trainer.process.environment import detect; from trainer.tools.tune.links import *; "
    "place = detect(os.environ); found = measure_links(place, 'cpu', 'gloo', 60, {}); "
    "place.rank or print(json.dumps(found))"
)


@needs_cluster
@pytest.mark.slow
def test_the_rate_of_a_link_is_found(tmp_path) -> None:
    with Cluster(2, "100mbit") as cluster, open(tmp_path / "out", "w") as out:
        assert cluster.run([sys.executable, "-c", SCRIPT], stdout=out) == [0, 0]
    machine = make_machine([json.loads((tmp_path / "out").read_text())], Place(0, 2, 0, 1))
    assert machine.across.bytes_per_s * 8 == pytest.approx(100e6, rel=0.1)  # with headers, 4.6 % less
