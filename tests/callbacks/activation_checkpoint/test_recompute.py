"""Bytes and FLOPs by hand, bits, random numbers of kept operations, and what torch.compile makes of it."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.activations import Stack, batch, equal, flops, kept, results, wrapped
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.callbacks.activation_checkpoint import recompute
from trainer.errors import ConfigError

POLICIES: list[dict[str, Any]] = [{"policy": "full"}, {"every": 2}, {"policy": "selective"}]


def by_hand(net: Stack, policy: str, every: int = 1) -> tuple[int, int]:
    """Bytes that all blocks keep, and FLOPs that run twice."""
    size = twice = 0
    for index, block in enumerate(net.blocks):
        if policy == "plain" or index % every:
            size += block.plain()
        else:
            size += block.input() + (block.products() if policy == "selective" else 0)
            twice += block.flops() if policy == "full" else 0
    return size, twice


@pytest.mark.parametrize(
    ("policy", "every"), [("plain", 1), ("full", 1), ("full", 2), ("full", 3), ("selective", 1), ("selective", 2)]
)
def test_bytes_and_flops_by_hand(policy, every):
    knobs = {} if policy == "plain" else {"policy": policy, "every": every}
    size, twice = by_hand(Stack(), policy, every)
    assert kept(wrapped(Stack(), **knobs)) == size
    assert flops(wrapped(Stack(), **knobs)) - flops(Stack()) == twice


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_runs_all_but_products_twice():
    counts: list[Counter[str]] = []
    for net in (Stack(), wrapped(Stack(), policy="selective")):
        with Operations() as operations:
            net(batch()).backward()
        counts.append(operations.counts)
    plain, selective = counts
    assert selective["mm"] == plain["mm"] > 0
    assert selective["gelu"] == 2 * plain["gelu"] == 2 * len(Stack().blocks)


@pytest.mark.parametrize("knobs", POLICIES, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_bits_do_not_change_with_dropout_and_autocast(knobs, autocast):
    found = []
    for net in (Stack(), wrapped(Stack(), **knobs)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(results(net))  # the backward pass under autocast, too
    assert equal(*found)
    assert not equal(results(Stack(dropout=0.0)), found[0])


@pytest.mark.parametrize("knobs", POLICIES, ids=str)
def test_recomputation_takes_the_autocast_of_its_forward_pass(knobs):
    """The trainer runs the backward pass outside of autocast."""
    found = []
    for net in (Stack(), wrapped(Stack(), **knobs)):
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(batch())
        torch.rand(7)  # the generator has gone on
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    assert equal(*found)
    assert not equal(results(Stack())[2:], found[0])


def test_without_a_gradient_nothing_is_wrapped(monkeypatch):
    monkeypatch.setattr(recompute, "checkpoint", None)
    with torch.no_grad():
        assert torch.isfinite(wrapped(Stack(), policy="full")(batch()))


class Normed(nn.Module):
    def __init__(self, momentum: float | None, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(8, momentum=momentum), nn.BatchNorm1d(8, track_running_stats=False)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh()) for norm in norms)
        if frozen:
            norms[0].eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(("momentum", "frozen"), [(0.1, False), (None, False), (0.1, True)])
def test_running_statistics_count_a_batch_once(policy, momentum, frozen):
    nets = Normed(momentum, frozen), wrapped(Normed(momentum, frozen), policy=policy)
    batches = torch.randn(2, 6, 8)
    for net in nets:
        for x in batches:
            net(x).backward()
    states = [list(net.state_dict().values()) for net in nets]
    assert equal(*states) and equal(*([p.grad for p in net.parameters()] for net in nets))
    counted = nets[1].blocks[0][1]
    assert counted.momentum == momentum and counted.num_batches_tracked == (0 if frozen else 2)


class Counting(nn.Module):
    """Has buffers that a forward pass changes in place, and anew: spectral_norm's, and its own."""

    def __init__(self, once: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.once = spectral_norm(nn.Linear(8, 8)), once
        for name in ("calls", "mean", "constant"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        if self.once and self.calls[0] > self.once:
            self.constant += 1
        return torch.tanh(self.linear(x)) + self.mean


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_second_run_has_the_buffers_of_the_first_and_leaves_them_alone(policy):
    block = Counting()
    nets = deepcopy(block), deepcopy(block)
    nets[1].forward = recompute.Recompute(nets[1], policy == "selective")
    for x in torch.randn(3, 2, 6, 8):  # two micro-batches of a step
        for net in nets:
            (net(x[0]).square().sum() + net(x[1]).square().sum()).backward()
    assert equal(*([p.grad for p in net.parameters()] for net in nets))
    states = [net.state_dict() for net in nets]
    assert states[1]["calls"][0] == 6 and equal(*(list(state.values()) for state in states))


def test_a_buffer_that_only_a_later_pass_changes_is_refused():
    net = Counting(once=1)
    net.forward = recompute.Recompute(net, False)
    net(torch.ones(2, 8)).sum().backward()
    with pytest.raises(
        ConfigError, match=r"^callbacks\.activation_checkpoint: Counting changes its buffer constant in a"
    ):
        net(torch.ones(2, 8))


@torch.library.custom_op("echelon_test::attend", mutates_args=())
def attend(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    mask = torch.rand(x.shape) >= dropout_p if dropout_p else torch.ones(x.shape, dtype=torch.bool)
    return x * mask, mask


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


attend.register_autograd(lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None), setup_context=_setup)


class Attention(nn.Module):
    """Attention that draws random numbers, then dropout that draws more, as on a GPU."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.randn(16, 16)), dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(attend(x @ self.weight, self.dropout)[0]), 0.5)


class Chain(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_kept_attention_with_dropout_leaves_later_random_numbers_alone(dropout, monkeypatch):
    """A kept result that is taken a second time would draw nothing, and shift all that follow."""
    monkeypatch.setattr(recompute, "KEPT", {*recompute.KEPT, "echelon_test::attend"})
    runs: list[float] = []
    own = torch.ops.echelon_test.attend.default
    decided = recompute.keep_products

    def watch(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        decision = decided(context, op, *args, **kwargs)
        if op is own:
            runs.append(decision == recompute.CheckpointPolicy.MUST_SAVE)
        return decision

    context = recompute.partial(recompute.create_selective_checkpoint_contexts, watch)
    monkeypatch.setattr(recompute, "CONTEXTS", context)
    assert equal(results(Chain(dropout)), results(wrapped(Chain(dropout), policy="selective")))
    assert runs[:2] == [not dropout] * 2


def test_all_fused_attention_of_torch_is_known():
    """An operation that is renamed would be recomputed without a word."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    forward = {
        name
        for name in names
        if name.startswith(("aten::_scaled_dot_product_", "aten::_flash_attention_f", "aten::_efficient_attention_f"))
        and not name.endswith(("backward", "_math", "_math_for_mps", "_inplace"))
    }
    assert forward <= recompute.KEPT
    assert {name for name in recompute.KEPT if name.startswith("aten::")} <= names


class Backend:
    """A backend of torch.compile that notes the operations of each graph, also within a recomputed region."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self.run = lookup_backend("aot_eager")

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
        self.graphs.append([str(node.target) for graph in graphs for node in graph.nodes])
        return self.run(module, inputs)


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


def compiled(net: nn.Module, backend: Backend) -> nn.Module:
    """Compiles block by block, outside of the recomputation, as role COMPILE does."""
    for block in net.blocks:
        block.compile(backend=backend)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_has_its_operations_and_the_recomputation_in_one_graph(policy, backend):
    """Blocks differ in width: each has a graph of its own."""
    plain, counted = results(Stack()), flops(Stack())
    net = compiled(wrapped(Stack(), policy=policy), backend)
    assert equal(results(net), plain)
    assert len(backend.graphs) == len(net.blocks)
    for targets in backend.graphs:
        assert "tag_activation_checkpoint" in targets
        assert sum("matmul" in target or "mm" in target for target in targets) == 2
    assert flops(net) - counted == (sum(b.flops() for b in net.blocks) if policy == "full" else 0)


def test_a_compiled_block_that_is_switched_off_is_compiled_without_recomputation(backend):
    net = wrapped(Stack((32, 32)), policy="full")
    for block in net.blocks:
        block.forward.on = False
    assert equal(results(compiled(net, backend)), results(Stack((32, 32))))
    assert backend.graphs and not any("tag_activation_checkpoint" in targets for targets in backend.graphs)
