"""Compiled blocks under a budget: fewer saved bytes, and the gradients of all bytes, with the same masks of dropout."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.activations import Stack, batch, results, stand_in
from support.messages import refuses
from support.runs import make
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.composition import arrange
from trainer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
BOUND = 1e-5  # relative: Inductor may fuse a recomputed operation with others


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(budget: float | None, **config: Any) -> tuple[list[Tensor], int]:
    """Return the gradients of one compiled block with dropout, and the bytes it keeps."""
    torch._dynamo.reset()
    with ExitStack() as undo:
        undo.enter_context(torch._inductor.config.patch(force_disable_caches=True, **config))
        if budget is not None:
            from trainer.callbacks.activation_checkpoint.compiled import set_budget

            set_budget(budget, undo)
        net = Stack((48,))
        net.blocks[0].compile(backend="inductor", dynamic=False)
        torch.manual_seed(3)
        return results(net), saved(net)


def saved(net: Stack) -> int:
    """Count the bytes that a forward pass saves, but for parameters."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(batch())
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    del loss
    return sum(size for address, size in sizes.items() if address not in own)


def differ(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_budget_keeps_fewer_bytes_and_the_masks_of_dropout():
    everything, most = compiled(None)
    some, less = compiled(0.0)
    assert differ(some, everything) < BOUND
    assert less < most / 2
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        theirs, _ = compiled(None)
    # Once this fails, torch draws no number twice, and `SavingSeeds` can go.
    assert differ(theirs, everything) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("eager_numbers", [False, True])
@pytest.mark.parametrize("budget", [0.5, 0.01])
def test_budgets_between_and_eagers_random_numbers(budget, eager_numbers):
    everything, most = compiled(None, fallback_random=eager_numbers)
    some, less = compiled(budget, fallback_random=eager_numbers)
    assert differ(some, everything) < BOUND and less < most


class Budgets(Callback):
    """The budget under which each step may compile."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen.append(torch._functorch.config.activation_memory_budget)


def train(callbacks: dict[str, Any], **options: Any) -> Any:
    trainer = make(Toy(depth=3, dropout=0.3), callbacks, **{"max_steps": 4, "log_every_steps": 1, **options})
    trainer.fit()
    return trainer


@pytest.mark.slow
def test_a_run_with_a_budget_trains_as_without_and_resumes_with_the_same_bits(tmp_path):
    def callbacks() -> dict[str, Any]:
        return {"compile": Compile(), "activation_checkpoint": ActivationCheckpoint(budget=0.1), "seen": Budgets()}

    plain = train({"compile": Compile()}, run_dir="runs/plain")
    whole = train(callbacks(), run_dir="runs/whole")
    train(callbacks(), run_dir="runs/half", max_steps=2)
    resumed = train(callbacks(), run_dir="runs/resumed", resume=str(next(Path("ckpt/half").glob("step-*2"))))
    for ours, others, bound in ((whole, plain, 1e-4), (resumed, whole, 0.0)):
        for a, b in zip(ours.module.parameters(), others.module.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=bound)
    assert whole.callbacks["seen"].seen == [0.1] * 4
    assert torch._functorch.config.activation_memory_budget == 1.0
    assert torch._inductor.config.custom_partitioner_fn is None


def test_a_budget_of_blocks_that_inductor_does_not_compile_is_refused():
    callbacks = {"compile": Compile(backend="aot_eager"), "activation_checkpoint": ActivationCheckpoint(budget=0.5)}
    with pytest.raises(ConfigError) as refusal:
        arrange(callbacks, set())
    assert str(refusal.value) == (
        "activation_checkpoint and compile can't run together: only Inductor holds compiled blocks to a budget; set "
        "callbacks.compile.backend=inductor, or use every=2 or policy=selective instead of budget"
    )
    arrange({**callbacks, "compile": Compile()}, set())


def test_blocks_of_a_budget_are_those_that_are_compiled():
    net = Stack()
    trainer = SimpleNamespace(**vars(stand_in(net)) | {"callbacks": {"compile": Compile()}, "undo": ExitStack()})
    with refuses("callbacks.activation_checkpoint.blocks=[Mlp]", "callbacks.compile.blocks"):
        ActivationCheckpoint(blocks=["Mlp"], budget=0.5).wrap_model(trainer, net)
    net(batch())
