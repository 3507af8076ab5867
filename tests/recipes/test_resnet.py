"""The network: torchvision's names and shapes, what each block computes, and where it begins."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recipes.resnet import Bottleneck, ResNet

# Of torchvision's resnet50: the blocks, channels that enter and channels of the 3 x 3 convolution, by stage.
STAGES = {1: (3, 64, 64), 2: (4, 256, 128), 3: (6, 512, 256), 4: (3, 1024, 512)}
PARAMETERS = 25_557_032  # as torchvision's documentation has it


def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    own: dict[str, tuple[int, ...]] = {f"{name}.{key}": (channels,) for key in ("weight", "bias")}
    own |= {f"{name}.{key}": (channels,) for key in ("running_mean", "running_var")}
    return own | {f"{name}.num_batches_tracked": ()}


def torchvision_resnet50() -> dict[str, tuple[int, ...]]:
    """The state dict's names and shapes, in its order."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    for stage, (blocks, inputs, width) in STAGES.items():
        for block in range(blocks):
            own, entering = f"layer{stage}.{block}", inputs if block == 0 else 4 * width
            shapes |= {f"{own}.conv1.weight": (width, entering, 1, 1), **norm(f"{own}.bn1", width)}
            shapes |= {f"{own}.conv2.weight": (width, width, 3, 3), **norm(f"{own}.bn2", width)}
            shapes |= {f"{own}.conv3.weight": (4 * width, width, 1, 1), **norm(f"{own}.bn3", 4 * width)}
            if block == 0:
                shapes |= {f"{own}.downsample.0.weight": (4 * width, inputs, 1, 1)}
                shapes |= norm(f"{own}.downsample.1", 4 * width)
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def test_names_and_shapes_are_those_of_torchvisions_resnet50():
    with torch.device("meta"):
        model = ResNet()
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert list(found.items()) == list(torchvision_resnet50().items()) and len(found) == 320
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS


def test_a_stage_halves_the_image_in_its_first_3_x_3_convolution():
    with torch.device("meta"):
        model = ResNet()
    strides = {name: module.stride for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    halving = [name for name, stride in strides.items() if stride == (2, 2)]
    first = [f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")]
    assert halving == ["conv1", *first]


def block_by_hand(block: Bottleneck, x: torch.Tensor) -> torch.Tensor:
    """In evaluation, with running statistics of 0 and 1."""

    def normed(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + norm.eps) ** 0.5 * norm.weight[:, None, None] + norm.bias[:, None, None]

    out = normed(block.bn1, F.conv2d(x, block.conv1.weight)).clamp(min=0)
    out = normed(block.bn2, F.conv2d(out, block.conv2.weight, stride=block.conv2.stride, padding=1)).clamp(min=0)
    out = normed(block.bn3, F.conv2d(out, block.conv3.weight))
    if block.downsample is not None:
        conv, last = block.downsample
        x = normed(last, F.conv2d(x, conv.weight, stride=conv.stride))
    return (out + x).clamp(min=0)


@pytest.mark.parametrize(("inputs", "stride", "shape"), [(8, 1, (2, 8, 6, 6)), (6, 2, (2, 8, 3, 3))])
def test_a_block(inputs, stride, shape):
    torch.manual_seed(0)
    block = Bottleneck(inputs, 2, stride).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    x = torch.randn(2, inputs, 6, 6)
    assert (block.downsample is None) == (inputs == 8)
    assert block(x).shape == shape
    torch.testing.assert_close(block(x), block_by_hand(block, x))


def test_a_block_begins_as_its_shortcut():
    torch.manual_seed(0)
    model = ResNet(classes=5, layers=(2, 1), width=4, small_stem=True)
    x = torch.randn(3, 16, 4, 4).relu()
    assert torch.equal(model.layer1[1](x), x)
    scales = [p for name, p in model.named_parameters() if name.endswith("bn3.weight")]
    assert len(scales) == 3 and not any(p.any() for p in scales)
    assert 0.005 < model.fc.weight.std() < 0.02 and not model.fc.bias.any()


@pytest.mark.parametrize(("small", "sizes"), [(True, [8, 8, 4, 2]), (False, [8, 2, 1, 1])])
def test_the_stem_for_small_images_keeps_their_size(small, sizes):
    model, seen = ResNet(classes=5, layers=(1, 1, 1), width=4, small_stem=small), [8]
    for name in model.stages:
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert seen == sizes
    assert [type(block) for block in model.blocks()] == [Bottleneck] * 3
