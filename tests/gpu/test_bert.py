"""BERT with a document mask on one CUDA device: FlexAttention's kernel gives what SDPA gives."""

from typing import Any

import pytest
import torch
from support.gpu import ACCELERATOR, DEVICE, ON_GPU, on_device, only_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bert import Bert
from recipes.wordpiece import SEP

pytestmark = on_device


@only_gpu
def test_flex_attention_trains_as_sdpa_does():
    """A tiny dropout, which draws nothing in evaluation, keeps the second model with SDPA."""
    results = []
    tokens = torch.randint(5, 512, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    tokens[:, [40, 41, 170, 255]] = SEP
    places = torch.arange(256, device="cuda").expand(2, 256)
    for dropout in (0.0, 0.01):
        torch.manual_seed(0)
        sizes = {"vocab": 512, "sequence": 256, "hidden": 128, "layers": 2, "heads": 2, "dropout": 0.0}
        model = Bert(**sizes, attention_dropout=dropout, document_mask=True).model().cuda().eval()
        output = model(tokens, places)
        output.square().mean().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for flex, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(flex, sdpa, rtol=1e-2, atol=1e-4)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("documents", [False, True])
def test_attention_runs_in_one_fused_kernel(documents):
    """A CPU has no such kernel with dropout."""
    dropout = 0.1 if ON_GPU else 0.0
    sizes = {"vocab": 512, "sequence": 128, "hidden": 128, "layers": 1, "heads": 2, "dropout": dropout}
    recipe = Bert(**sizes, document_mask=documents)
    model = recipe.model().to(DEVICE).train()
    tokens = torch.randint(5, 512, (2, 128), device=DEVICE)
    tokens[:, [40, 127]] = SEP
    batch = {"input_ids": tokens, "positions": torch.arange(9, device=DEVICE).expand(2, 9)}
    with Operations() as seen, torch.autocast(ACCELERATOR, torch.bfloat16):
        recipe.loss(model, {**batch, "labels": batch["positions"]}).backward()
    kernels = {name for name in seen.names if name.startswith("_scaled_dot_product")}
    assert len(kernels) == 2 and not any("math" in name for name in kernels)  # forward and backward
