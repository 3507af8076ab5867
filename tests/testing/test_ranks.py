"""Ranks that are forked from a test: results in order, errors with their rank, a limit of time."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from trainer.testing.ranks import run_ranks


def test_ranks_talk_and_give_their_results_in_order():
    def add(place, folder):
        dist.init_process_group("gloo", f"file://{place.store}", rank=place.rank, world_size=place.world)
        total = torch.tensor([place.rank + 1])
        dist.all_reduce(total)
        return place.rank, total.item(), os.getcwd() == str(folder)

    assert run_ranks(3, add, 60) == [(0, 6, True), (1, 6, True), (2, 6, True)]


def test_a_rank_that_hangs_or_dies_is_named():
    with pytest.raises(AssertionError, match="rank 1 of 2 did not end in 0 s"):
        run_ranks(2, lambda place, folder: time.sleep(60 * place.rank), 0.3)
    with pytest.raises(AssertionError, match="rank 0 of 1: the process died"):
        run_ranks(1, lambda place, folder: os.kill(os.getpid(), 9), 60)
    with pytest.raises(AssertionError, match="rank 0 of 1: the process died"):
        run_ranks(1, lambda place, folder: os._exit(0), 60)


def test_an_error_is_told_with_its_rank_and_its_frames():
    with pytest.raises(AssertionError, match=r"(?s)^rank 1 of 2: Traceback .*ZeroDivisionError: division by zero$"):
        run_ranks(2, lambda place, folder: 1 / (1 - place.rank) and time.sleep(60), 60)
