"""Which parameters decay, which do not, and which are in no group."""

from torch import nn

from trainer.optim.groups import parameter_groups


def test_no_decay_on_norms_and_biases():
    """A transformer layer: in and out projections and two linear layers decay; their biases and two norms do not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    decay, rest = parameter_groups(layer)
    names = {p: name for name, p in layer.named_parameters()}
    assert {names[p] for p in decay["params"]} == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    }  # fmt: skip
    assert len(rest["params"]) == 8
    assert {names[p].rpartition(".")[2] for p in rest["params"]} == {"bias", "in_proj_bias", "weight"}
    assert len(decay["params"]) + len(rest["params"]) == len(names)


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.linear1.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(layer)) == 10
    assert len(parameter_groups(nn.LayerNorm(4))) == 1
    assert len(parameter_groups(nn.Linear(4, 4, bias=False))) == 1
