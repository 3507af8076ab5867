"""The workload that predictions start from."""

import pytest
from support.cli import ROOT
from support.costs import choose, machine, setup

from trainer.callbacks.pipeline.cost import SPLIT
from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.tools.tune.workload import make_workload, outline, with_phases, without_recomputation


def test_the_slowest_rank_is_the_workload() -> None:
    one = {"parameters": [3], "shapes": [[3]], "forward_s": 1.0, "backward_s": 2.0, "pass_s": 0.1, "optimizer_s": 0.2}
    one |= {
        "other_s": 0.0,
        "data_s": 0.3,
        "activation_bytes": 5.0,
        "state_bytes": 6.0,
        "random": False,
        "compute": [1.0],
        "parts": [0.2, 0.8, 0.0],
        "part_of": [1],
    }
    other = {**one, "forward_s": 0.5, "pass_s": 9.0, "activation_bytes": 7.0}  # a fixed part that makes up for it
    work = make_workload([{**one, "step_s": 3.5}, {**other, "step_s": 3.0}])
    assert (work.forward_s, work.backward_s, work.pass_s, work.parameters) == (1.0, 2.0, 0.1, (3,))
    assert work.activation_bytes == 7.0 and work.shapes == ((3,),)
    assert work.parts == (0.2, 0.8, 0.0)


def test_what_recomputation_costs_is_measured_once() -> None:
    full = choose({"activation_checkpoint": {}})
    found = without_recomputation(setup(machine(1), full, activation_bytes=1.0, pass_s=0.4))
    assert found.backward_s == pytest.approx(0.2 - 0.1) and found.activation_bytes == pytest.approx(10.0)
    assert found.pass_s == pytest.approx(0.3)
    none = choose({"activation_checkpoint": {"budget": 0.0}})
    assert without_recomputation(setup(machine(1), none, activation_bytes=1.0)).activation_bytes == 1.0


def test_the_outline_of_a_model_with_the_phases_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in two stages have 6 of 12 samples each, and half of the model. Its state is on two ranks each."""
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    folder = ROOT / "tests" / "toy" / "conf"
    found = outline(compose(["--config-dir", str(folder), "recipe=toy"], [CONF, folder])[0].config)
    assert found["shapes"][0] == [16, 8] and found["blocks"] == 2 and found["batch_norm"] is False
    choice = choose({"pipeline": {"stages": 2}, "shard": {"stage": 1}})
    own = setup(machine(4), choice, 12, parameters=tuple(found["parameters"]), shapes=())
    phases = {"forward": 0.3, "backward": 0.6, "optimizer": 0.01}
    work = make_workload([with_phases(found, phases, own)])
    assert (work.forward_s, work.backward_s) == (pytest.approx(0.1), pytest.approx(0.2))
    split = setup(machine(4), choose({"pipeline": {"schedule": "zbv"}}), 12, parameters=own.workload.parameters)
    assert with_phases(found, phases, split)["backward_s"] == pytest.approx(0.2 / SPLIT)  # predictions add it
    assert work.optimizer_s == pytest.approx(0.02 / own.stepped) and 0.5 <= own.stepped < 1
