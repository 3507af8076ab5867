"""BERT with a document mask on one CUDA device: FlexAttention's kernel gives what SDPA gives."""

import torch
from support.gpu import on_device, only_gpu

from recipes.bert import Bert
from recipes.corpus import SEP

pytestmark = [*on_device, only_gpu]


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
