"""Rates that user code sets by hand: they stay where the schedule is constant, and are refused where it is not."""

import pytest
import torch
from support.messages import refuses

from trainer.errors import ConfigError
from trainer.optim.rates import Rates
from trainer.optim.schedule import Constant, Linear, Schedule


def made(schedule: Schedule) -> tuple[Rates, torch.optim.Optimizer]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return Rates(schedule.resolve(10, 4, None), optimizer), optimizer


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("step", [0, 3])
def test_a_rate_set_by_hand_stays_also_after_a_resume(step):
    rates, optimizer = made(Constant())
    for now in range(step):
        rates.put(now)
    optimizer.param_groups[1]["lr"] = 0.05
    for now in range(step, 6):
        rates.put(now)
        assert rates_of(optimizer) == [0.1, pytest.approx(0.05)]
    again, resumed = made(Constant())
    again.load_state_dict(rates.state_dict())
    again.put(6)
    assert rates.by_hand and rates_of(resumed) == rates_of(optimizer)


def test_a_rate_set_after_the_last_step_is_in_its_checkpoint():
    """As a callback sets it at a validation, after which the checkpoint is written."""
    rates, optimizer = made(Constant())
    rates.put(0)
    optimizer.param_groups[1]["lr"] = 0.02
    saved = rates.state_dict()
    assert saved == [0.1, pytest.approx(0.02)] == rates.state_dict()
    rates.put(1)
    assert rates_of(optimizer) == [0.1, pytest.approx(0.02)]
    again, resumed = made(Constant())
    again.load_state_dict(saved)
    again.put(1)
    assert rates_of(resumed) == rates_of(optimizer)


@pytest.mark.parametrize("schedule", [Linear(), Constant(warmup=5)])
def test_a_rate_that_the_schedule_sets_is_refused(schedule):
    rates, optimizer = made(schedule)
    rates.put(0)
    rates.put(1)
    optimizer.param_groups[1]["lr"] = 0.05
    with refuses("optimizer.param_groups[1]['lr']=0.05", "3", "schedule=constant"):
        rates.put(2)


def test_a_further_group_is_refused():
    rates, optimizer = made(Constant())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match=r"^optimizer: a group was added or removed before step 1, and a resume"):
        rates.put(0)
