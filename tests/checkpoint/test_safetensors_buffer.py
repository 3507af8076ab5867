"""The memory of a checkpoint's file."""

import pytest
import torch
from safetensors.torch import load

from trainer.checkpoint.safetensors_buffer import SafetensorsBuffer


@pytest.mark.parametrize("touched", [True, False])
def test_the_content_is_a_file_of_safetensors(touched):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(0), "c": torch.tensor([True, False])}
    buffer = SafetensorsBuffer(tensors, touched)
    for name, tensor in tensors.items():
        buffer.views[name].copy_(tensor)
    found = load(bytes(buffer.content))
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
