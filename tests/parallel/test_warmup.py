"""Discarded passes leave no trace in buffers, and are timed."""

import time

import torch
from torch import nn

from trainer.comm.ranks import Ranks
from trainer.parallel.warmup import buffers_kept, time_pass
from trainer.process.environment import Place


def test_running_statistics_are_as_before():
    norm = nn.Sequential(nn.BatchNorm1d(2))
    before = [buffer.clone() for buffer in norm.buffers()]
    with buffers_kept(norm):
        norm(torch.randn(5, 2))
        assert not any(torch.equal(a, b) for a, b in zip(norm.buffers(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), before, strict=True))


def test_a_pass_is_timed_once():
    passes: list[None] = []

    def run_pass() -> None:
        passes.append(time.sleep(0.02))

    assert 0.02 <= time_pass(run_pass, Ranks(Place(), "cpu", "auto", 60.0)) < 5 and len(passes) == 1
