"""Muon for hidden matrices is torch's, and all else is AdamW; who is hidden; what can't be resumed."""

from functools import partial

import pytest
import torch
from support.messages import refuses
from torch import nn

from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.optim.groups import ParameterRules, WithGroups, hidden_matrices, make_optimizer, parameter_groups
from trainer.optim.muon import Muon


class Words(nn.Module):
    """An embedding, tied to the output; positions; a convolution; a stack; a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(10, 6), nn.EmbeddingBag(5, 6)
        self.stack = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.convolution = nn.Conv1d(6, 6, 3)
        self.tied = nn.Linear(6, 10, bias=False)
        self.tied.weight = self.words.weight
        self.head = nn.Linear(6, 3)


def names_of(module: nn.Module, params) -> set[str]:
    return {name for name, p in module.named_parameters() if p in set(params)}


def test_hidden_are_matrices_that_are_no_embedding_and_not_tied_to_one():
    module = Words()
    assert names_of(module, hidden_matrices(module)) == {"stack.0.weight", "stack.2.weight", "head.weight"}


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_model_of_transformers_is_not_hidden(tied):
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    module = nn.Sequential(BertForMaskedLM(BertConfig(vocab_size=20, tie_word_embeddings=tied, **sizes)))
    found = names_of(module, hidden_matrices(module))
    assert len(found) == 7  # query, key, value and output; two of the feed-forward; the head's transform
    assert not [name for name in found if "embeddings" in name or "decoder" in name]


def test_each_part_is_torchs_own():
    torch.manual_seed(0)
    ours, theirs = Words(), Words()
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(partial(Muon, lr=0.02, weight_decay=0.1, adamw_lr=0.003), ours)
    hidden = [p for name, p in theirs.named_parameters() if name in ("stack.0.weight", "stack.2.weight", "head.weight")]
    rest = [p for p in theirs.parameters() if p not in set(hidden)]
    both = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        adamw(
            [
                {"params": [p for p in rest if p.dim() > 1]},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=0.003,
            weight_decay=0.1,
        ),
    ]
    for _ in range(4):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for one in (optimizer, *both):
            one.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters()))
    assert {len(state) for state in optimizer.state.values()} == {1, 3}


def test_an_update_of_a_matrix_is_orthogonal():
    p = nn.Parameter(torch.zeros(6, 6))
    optimizer = Muon([{"params": [p], "hidden": True}], lr=1.0, adjust_lr_fn="original")
    torch.manual_seed(1)
    p.grad = torch.randn_like(p)
    optimizer.step()
    values = torch.linalg.svdvals(p.detach())
    assert values.min() > 0.5 and values.max() < 1.5


def test_refusals():
    with refuses("optimizer=muon", "functools.partial"):
        Muon(parameter_groups(Words()))
    with refuses("optimizer=muon", "optimizer.groups"):
        make_optimizer(Muon, nn.LayerNorm(4))
    with refuses("optimizer.groups", "hidden=true", "4"):
        Muon([{"params": [nn.Parameter(torch.ones(4))], "hidden": True}])


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (
            {"match": ["*.weight"], "betas": [0.5, 0.5]},
            r"^optimizer\.groups: betas=\[0\.5, 0\.5\] .* Muon; .*hidden: false",
        ),
        ({"match": "positions.*", "momentum": 0.5}, r"^optimizer\.groups: momentum=0\.5 .* AdamW; .*hidden: true"),
        (
            {"match": "words.*", "nesterov": False},
            r"nesterov=False has no effect on parameters that are stepped by AdamW",
        ),
        ({"match": "*.bias", "ns_steps": 3}, r"ns_steps=3 has no effect on parameters that are stepped by AdamW"),
        ({"match": "head.weight", "hidden": False, "adjust_lr_fn": "original"}, r"adjust_lr_fn=original has no effect"),
    ],
)
def test_a_setting_of_the_other_part_is_refused(group, reason):
    optimizer, module = WithGroups(Muon, [group]), Words()
    module.positions = nn.Embedding(3, 6)
    with pytest.raises(ConfigError, match=reason):
        make_optimizer(optimizer, module, ParameterRules(optimizer, None, module))


def test_settings_of_a_groups_own_part_are_taken():
    groups = [
        {"match": "stack.0.weight", "momentum": 0.5, "lr": 0.1, "eps": 1e-5},
        {"match": "words.*", "betas": [0.5, 0.6], "eps": 1e-3},
        {"match": "*.weight", "weight_decay": 0.3, "lr_scale": 0.5},
    ]
    optimizer, module = WithGroups(Muon, groups), Words()
    made = make_optimizer(optimizer, module, ParameterRules(optimizer, None, module))
    group = {p: group for group in made.param_groups for p in group["params"]}
    assert [group[module.stack[0].weight][key] for key in ("momentum", "eps")] == [0.5, 1e-5]  # Muon has an eps, too
    assert group[module.words.weight]["betas"] == [0.5, 0.6]


@pytest.mark.parametrize("was_hidden", [True, False])
def test_a_state_of_the_other_part_is_refused(was_hidden):
    p, q, r = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    groups = [{"params": [p], "hidden": was_hidden}, {"params": [q], "hidden": True}, {"params": [r], "hidden": False}]
    before = Muon(groups)
    for each in (p, q, r):
        each.grad = torch.ones_like(each)
    before.step()
    after = Muon([{"params": [p, q] if not was_hidden else [q], "hidden": True},
                  {"params": [p, r] if was_hidden else [r], "hidden": False}])  # fmt: skip
    after.state = before.state
    weights = p.detach().clone()
    with refuses("trainer.resume", "optimizer.groups"):
        after.step()
    assert torch.equal(p, weights)
