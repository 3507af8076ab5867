"""Sends gradients in 16 bits: bf16, or fp16 with a scale that all ranks share."""

import torch
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.reduce import Reduce
from trainer.cost.messages import Message, Shapes, elements


class BFloat16(Codec):
    """Sends bfloat16: float32's range, with 8 bits of precision. Takes one pass less than torch's `bf16_compress_hook`.

    The cast, the division by the number of ranks and each addition round by at most 2^-8 of the mean magnitude.
    """

    def payload_bytes(self, shapes: Shapes) -> float:
        return 2.0 * elements(shapes)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        payload = self.buffer(flat, torch.bfloat16).copy_(flat)
        if out is not flat:
            flat -= payload
        out.copy_(reduce(payload, bucket))


class Float16(Codec):
    """Sends float16: 11 bits of precision (Micikevicius et al. 2018, arXiv:1710.03740).

    All ranks agree on a scale per bucket: the largest power of two for which no partial sum can exceed 65,504, whatever
    the loss scale. This sends one extra number before each bucket. Values that are not finite stay so.
    """

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        return [Message("all_reduce", 4), Message("all_reduce", 2.0 * elements(shapes))]

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        low, high = flat.aminmax()
        # (1,): the sum over ranks of each rank's largest magnitude.
        bound = reduce(torch.maximum(-low, high).float().view(1), bucket.cut(0, 1)) * self.ranks
        scale = torch.exp2(torch.floor(torch.log2(65504.0 / bound.clamp(min=2.0**-100))))
        payload = self.buffer(flat, torch.half).copy_(flat.mul_(scale))
        if out is not flat:
            flat.sub_(payload).div_(scale)
        out.copy_(reduce(payload, bucket)).div_(scale)
