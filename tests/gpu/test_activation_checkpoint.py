"""Policies of activation_checkpoint on CUDA: the same bits with fused attention and dropout, less memory, no wait."""

from typing import Any

import pytest
import torch
from support.activations import stand_in
from support.gpu import on_device, only_gpu
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.callbacks.activation_checkpoint import ActivationCheckpoint

pytestmark = [*on_device, only_gpu]
BATCH, TOKENS, HIDDEN, HEADS, LAYERS = 8, 256, 256, 4, 6
POLICIES: list[dict[str, Any]] = [
    {"policy": "full"}, {"policy": "selective"}, {"every": 2}, {"budget": 0.5}, {"policy": "offload"},
]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def run(knobs: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Gradients of the second of two passes, and the bytes that its forward pass keeps."""
    torch.use_deterministic_algorithms(True)
    net = Net().cuda()
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).cuda()

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return net(x)

    if knobs:
        trainer = stand_in(net)
        trainer.device = torch.device("cuda", torch.cuda.current_device())
        callback = ActivationCheckpoint(**knobs)
        callback.wrap_model(trainer, net)
        callback.rehearse(trainer, lambda _: forward().backward(), None)
    forward().backward()
    net.zero_grad()
    torch.manual_seed(2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [p.grad for p in net.parameters() if p.grad is not None], kept


@pytest.mark.parametrize("knobs", POLICIES, ids=str)
def test_the_same_bits_in_less_memory_without_a_wait(knobs):
    (plain, most), (gradients, kept) = run({}), run(knobs)
    assert all(map(torch.equal, plain, gradients)) and len(plain) == len(gradients)
    assert kept < 0.8 * most
