"""Two versions of some weights: which one a model uses, and how much memory they have."""

import torch
from torch import Tensor, nn

from trainer.callbacks.pipeline.weight_versions import Version, WeightVersions


class Twice(nn.Module):
    """A layer, a recurrent one, and a module that uses the layer's weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.recurrent = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.tied(self.layer(x))[None])[0][0]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_a_backward_pass_after_a_step_uses_the_weights_before_it():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 3)
    parameters = list(model.parameters())
    versions, old = WeightVersions(model, parameters), Version(parameters)
    expected = gradients(model, x)
    versions.use(old.leaves)
    loss = model(x).square().sum()
    versions.use(parameters)
    before = [p.clone() for p in parameters]
    versions.part(old)
    torch.optim.SGD([{"params": parameters}], lr=0.1).step()  # nothing: the parameters have no gradients
    assert all(torch.equal(p, other) for p, other in zip(parameters, before, strict=True))
    with torch.no_grad():
        torch._foreach_add_(parameters, 1.0)
    loss.backward()
    assert all(torch.equal(leaf, other) for leaf, other in zip(old.leaves, before, strict=True))
    assert [p.grad for p in parameters] == [None] * len(parameters)
    versions.release(old)
    assert all(torch.equal(p.grad, other) for p, other in zip(parameters, expected, strict=True) if p.grad is not None)
    assert dict(model.named_parameters()).keys() == {name for name, _ in Twice().named_parameters()}
    assert all(p is other for p, other in zip(model.parameters(), parameters, strict=True))


def test_there_is_memory_for_two_versions():
    model = Twice()
    parameters = list(model.parameters())
    versions = WeightVersions(model, parameters)
    seen: set[int] = set()
    old = None
    for _ in range(5):
        if old is not None:
            versions.release(old)
        old = Version(parameters)
        seen |= {p.data_ptr() for p in (*parameters, *old.leaves)}
        versions.part(old)
        seen |= {p.data_ptr() for p in (*parameters, *old.leaves)}
    assert len(seen) == 2 * len(parameters)


def test_a_version_whose_passes_end_before_the_step_takes_none():
    model = Twice()
    parameters = list(model.parameters())
    versions, version = WeightVersions(model, parameters), Version(parameters)
    versions.release(version)
    assert [p.data_ptr() for p in version.leaves] == [p.data_ptr() for p in parameters] and not versions.spare
