"""Ranks that do not meet: torch's error is one line, as far as the user can do something about it."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.errors import message


@pytest.mark.parametrize("is_master", [True, False])
def test_ranks_that_do_not_come_are_one_line(is_master):
    host = dist.TCPStore("127.0.0.1", 0, 1, True)
    port = 0 if is_master else host.port
    del host
    with pytest.raises(dist.DistError) as error:
        dist.TCPStore("127.0.0.1", port, 2, is_master, timedelta(seconds=1))
    line = message(error.value)
    assert line.startswith("echelon: the ranks did not meet: ") and "\n" not in line
    assert line.endswith("; start all of them, and let all reach MASTER_ADDR")


def test_another_error_of_the_store_keeps_its_traceback():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=0.1))
    with pytest.raises(dist.DistError) as error:
        store.get("absent")
    assert message(error.value).startswith("Traceback")
