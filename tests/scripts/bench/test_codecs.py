"""Each codec is in the table, with the bytes that it sends; the clock; torch's hooks."""

import time

import pytest
import torch

from scripts.bench import codecs as bench
from trainer.comm.codecs.registry import CODECS
from trainer.comm.codecs.topk import TopK


def test_the_model_is_a_bert_of_about_25m_parameters() -> None:
    assert 24e6 < sum(torch.Size(shape).numel() for shape in bench.shapes()) < 26e6


def test_each_codec_has_a_row(monkeypatch) -> None:
    torch.set_num_threads(1)
    small = bench.shapes(width=32, layers=1, words=1000)
    monkeypatch.setattr(bench, "shapes", lambda: small)
    monkeypatch.setattr(bench, "CODECS", {**CODECS, "topk": TopK})
    rows = {row["codec"]: row for row in bench.measure(torch.device("cpu"), rounds=2)}
    assert rows.keys() > {*CODECS, "topk", "torch's fp16 hook", "torch's PowerSGD hook, rank 1", "top-k that sorts"}
    assert rows["bf16"]["sends, of float32"] == 0.5
    assert rows["topk"]["sends, of float32"] == pytest.approx(0.01, rel=0.01)  # 16 bits of value and index for 1 %
    assert rows["topk"]["encode"] > 0 and rows["topk"]["decode"] > 0 and rows["bf16"]["encode"] == "-"
    for row in rows.values():
        assert row["mean, all of it"] > 0 and row["ms per 100 MB"] > 0
    goals = bench.goals([{"codec": "topk", "ms per 100 MB": 90.0}, {"codec": "dgc", "ms per 100 MB": 100.0}])
    assert [goal.met for goal in goals] == [True, False]


def test_the_clock() -> None:
    """Sleeping is no work; working is."""

    def work() -> str:
        began = time.process_time()
        while time.process_time() - began < 0.02:
            pass
        return "done"

    clock = bench.Clock(torch.device("cpu"))
    assert clock(time.sleep, 0.02)[0] < 15
    ms, result = clock(work)
    assert 20 <= ms < 200 and result == "done"


def test_torchs_hooks_do_their_work() -> None:
    """A hook that got a bucket it does not know how to read would be timed for nothing."""
    param = torch.randn(16, 8)
    bucket = bench.Bucket.of([param], 1)
    flats = [torch.zeros(128)]
    runners = bench.runners([(param.view(-1), bucket)])
    runners["torch's bf16 hook"].round(flats, bench.Clock(torch.device("cpu")))
    assert torch.equal(flats[0], (param.view(-1).bfloat16() / 2).float())
    for _ in range(3):
        runners["torch's PowerSGD hook, rank 1"].round(flats, bench.Clock(torch.device("cpu")))
    assert torch.linalg.matrix_rank(flats[0].view(16, 8)) == 1
