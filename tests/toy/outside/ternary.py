"""A codec from outside Echelon."""

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.cost.messages import Shapes, elements


class Ternary(Codec):
    """Sends -1, 0 or 1 for each element, and a scale for each bucket.

    Args:
        threshold: Share of the mean magnitude below which an element is sent as 0.
    """

    gathers = True
    feedback = True

    def __init__(self, threshold: float = 0.7) -> None:
        super().__init__()
        self.threshold = threshold

    def payload_bytes(self, shapes: Shapes) -> float:
        return elements(shapes) + 4.0

    def encode(self, flat: Tensor, bucket: Bucket) -> Tensor:
        size = flat.abs()
        sent = size > self.threshold * size.mean()
        scale = (size * sent).sum() / sent.sum().clamp(min=1)
        return torch.cat([scale.float().view(1).view(torch.int8), (flat.sign() * sent).to(torch.int8)])

    def decode(self, payload: Tensor, out: Tensor, weight: float, bucket: Bucket) -> None:
        scale = payload[:4].clone().view(torch.float32)
        out.add_(payload[4:].to(out.dtype) * scale.to(out.dtype), alpha=weight)
