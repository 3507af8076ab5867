"""A loss in chunks: the plain loss and its gradients, with fewer bytes at a time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.chunked_loss import cross_entropy

ROWS, HIDDEN, VOCAB = 210, 16, 1000


def inputs() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCAB), torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (ROWS,))


def gradients(loss: Tensor, head: nn.Linear, rows: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [rows, *head.parameters()])]


@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 210, 999])
def test_loss_and_gradients_are_the_plain_ones(chunks: int):
    """In float64, where another order of a sum is far below the tolerance."""
    head, rows, labels = inputs()
    head, rows = head.double(), rows.detach().double().requires_grad_()
    expected = gradients(F.cross_entropy(head(rows), labels), head, rows)
    found = gradients(cross_entropy(head, rows, labels, chunks), head, rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_one_chunk_has_the_plain_bits_and_no_second_pass():
    head, rows, labels = inputs()
    calls: list[int] = []
    head.register_forward_hook(lambda *_: calls.append(1))
    found = gradients(cross_entropy(head, rows, labels, 1), head, rows)
    assert len(calls) == 1
    expected = gradients(F.cross_entropy(head(rows), labels), head, rows)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that the run had allocated at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most


def test_peak_memory_falls_with_the_chunks():
    """The plain loss has the logits three times: themselves, their logarithms, and the gradient."""
    head, rows, labels = inputs()
    logits = 4 * ROWS * VOCAB
    peaks = [
        peak_bytes(lambda chunks=chunks: gradients(cross_entropy(head, rows, labels, chunks), head, rows))
        for chunks in (1, 2, 4, 10)
    ]
    assert peaks[0] >= 2 * logits
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < peaks[0] / 4
