"""A model is set to training or to eval for a while."""

from torch import nn

from trainer.parallel.modes import evaluating, training


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_each_module_gets_its_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
    assert modes(model) == before
    with training(model):
        assert modes(model) == before  # a part in eval stays there
    model.eval()
    with training(model):
        assert all(modes(model))
    assert not any(modes(model))
