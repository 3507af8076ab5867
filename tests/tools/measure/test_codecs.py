"""Each codec has a cost; one that gathers costs more with more ranks."""

import pytest
import torch

from trainer.comm.codecs.registry import CODECS
from trainer.tools.measure import codecs


def test_each_codec_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SHAPE", (128, 64))
    found = codecs.measure(torch.device("cpu"), codecs.by_name())
    assert found.keys() == {"none", *CODECS}
    assert all(cost.encode_s_per_byte + cost.decode_s_per_byte > 0 for cost in found.values())
    assert all(cost.encode_s_per_byte >= 0 and cost.decode_s_per_byte >= 0 for cost in found.values())


def test_a_cost_gives_the_seconds_back() -> None:
    two, six = codecs.RANKS
    cost = codecs.cost([3e-9 + two * 1e-9, 3e-9 + six * 1e-9])
    assert (cost.encode_s_per_byte, cost.decode_s_per_byte) == (pytest.approx(3e-9), pytest.approx(1e-9))
    noisy = codecs.cost([3e-9, 2e-9])
    assert (noisy.encode_s_per_byte, noisy.decode_s_per_byte) == (3e-9, 0.0)
