"""AdamW with 8-bit moments: its size, its distance from AdamW, tables that parameters share."""

import importlib
import logging
import sys
import types

import pytest
import torch
from support.messages import refuses
from torch import nn

from trainer.optim.factories import adamw, adamw8bit


def test_moments_have_a_byte_an_element_and_a_scale_for_each_256():
    p, small = nn.Parameter(torch.randn(128, 65)), nn.Parameter(torch.randn(4095))
    optimizer = adamw8bit([{"params": [p, small]}])
    for each in (p, small):
        each.grad = torch.randn_like(each)
    optimizer.step()
    state = optimizer.state[p]
    assert [state[key].dtype for key in ("state1", "state2")] == [torch.uint8] * 2
    assert [state[key].shape for key in ("absmax1", "absmax2")] == [(33,)] * 2  # 8320 elements
    assert optimizer.state[small]["state1"].dtype == torch.float32


def test_the_path_is_adamws_to_a_few_percent():
    torch.manual_seed(0)
    start = torch.randn(96, 96)
    weights = []
    for maker in (adamw, adamw8bit):
        p = nn.Parameter(start.clone())
        optimizer = maker([{"params": [p]}], lr=0.01, weight_decay=0.1)
        for step in range(30):
            p.grad = p.detach() + 0.1 * torch.randn(96, 96, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        weights.append(p.detach())
    moved = (weights[0] - start).norm()
    assert moved > 5.0 and 0 < (weights[1] - weights[0]).norm() < 0.05 * moved


def test_a_table_that_was_copied_is_shared_again_and_another_one_is_refused():
    from trainer.optim.adamw8bit import AdamW8bit

    ours = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    optimizer = AdamW8bit([{"params": ours}])
    for _ in range(2):
        for p in ours:
            p.grad = torch.randn_like(p)
            for key in ("qmap1", "qmap2") if optimizer.state[p] else ():
                optimizer.state[p][key] = optimizer.state[p][key].clone()  # as a resume does
        optimizer.step()
    one, other = (optimizer.state[p] for p in ours)
    assert one["qmap1"] is other["qmap1"] and one["qmap2"] is other["qmap2"] and one["qmap1"] is not one["qmap2"]
    one["qmap2"] = other["qmap2"] + 1e-3
    with refuses("trainer.resume", "8-bit", "qmap2"):
        optimizer.step()


def test_its_import_downloads_nothing_and_leaves_no_trace(monkeypatch, caplog):
    """bitsandbytes would take a package `kernels` that downloads code, and else warn."""
    from trainer.optim.adamw8bit import no_downloads

    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    fake = types.ModuleType("kernels")
    for loaded in (fake, None):
        monkeypatch.delitem(sys.modules, "kernels", raising=False)
        if loaded:
            monkeypatch.setitem(sys.modules, "kernels", loaded)
        with no_downloads():
            logger.warning("no kernels")
            with pytest.raises(ImportError):
                importlib.import_module("kernels")
        assert sys.modules.get("kernels") is loaded and not caplog.records and not logger.disabled


def test_another_memory_format_is_refused():
    """The library would make the weight contiguous at its first step: another convolution, so other bits."""
    module = nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)
    with refuses("optimizer=adamw8bit", "(4, 4, 2, 2)", "contiguous_format"):
        adamw8bit([{"params": list(module.parameters())}])
