"""Saved tensors lie on the host, come back ahead of their use, and have the same bits; parameters stay."""

import copy
import gc
from typing import Any

import pytest
import torch
from support.activations import CPU, FLOAT, INNER, ROWS, WIDTH, Mlp, Stack, batch, equal, results, wrapped
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from scripts.bench.activations import Live
from trainer.callbacks.activation_checkpoint import offload
from trainer.callbacks.activation_checkpoint.offload import Call, Copies


class Host:
    """Tells host memory from the device's, which is the same on a CPU, and notes all copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
        self.live = Live([*net.parameters(), *net.buffers()], CPU)
        self.refs: list[tuple[StorageWeakRef, int]] = []
        self.copies: list[tuple[str, list[int]]] = []
        own_host, own_start = Copies.host, Copies.start

        def host(copies: Copies, nbytes: int) -> Tensor:
            tensor = own_host(copies, nbytes)
            weak = StorageWeakRef(tensor.untyped_storage())
            self.refs.append((weak, nbytes))
            self.live.owned.add(weak.cdata)
            self.live.made.pop(weak.cdata, None)
            return tensor

        def start(copies: Copies, pairs: list[tuple[Tensor, Tensor]]) -> Any:
            on_host = {weak.cdata for weak, _ in self.refs}
            out = bool(pairs) and StorageWeakRef(pairs[0][0].untyped_storage()).cdata in on_host
            self.copies.append(("out" if out else "in", sorted(target.nbytes for target, _ in pairs)))
            return own_start(copies, pairs)

        monkeypatch.setattr(Copies, "host", host)
        monkeypatch.setattr(Copies, "start", start)

    def bytes(self) -> int:
        return sum(nbytes for weak, nbytes in self.refs if not weak.expired())


def saved_by(inner: int) -> list[int]:
    return sorted(FLOAT * ROWS * width for width in (WIDTH, inner, inner, WIDTH))


def test_saved_tensors_are_on_the_host_but_for_those_of_the_last_block(monkeypatch):
    net = wrapped(Stack(), policy="offload")
    host = Host(monkeypatch, net)
    x = batch()
    with host.live:
        loss = net(x)
        assert host.bytes() == sum(block.plain() for block in net.blocks)
        assert host.live.bytes() - FLOAT == net.blocks[-1].plain()
        loss.backward()
        del loss
    assert host.bytes() == 0  # the host's memory goes with the graph
    gradients = sum(p.nbytes for p in net.parameters())
    assert host.live.bytes() == gradients
    assert host.copies[: len(INNER)] == [("out", saved_by(inner)) for inner in INNER]  # no weight is among them
    assert host.copies[len(INNER) :] == [("in", saved_by(inner)) for inner in INNER[-2::-1]]


def test_a_block_comes_back_before_its_backward_pass_begins(monkeypatch):
    net = wrapped(Stack(), policy="offload")
    host, order = Host(monkeypatch, net), list[str]()
    start = Copies.start

    def noted(copies: Copies, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        order.append("copy")
        return start(copies, pairs)

    monkeypatch.setattr(Copies, "start", noted)
    for index, block in enumerate(net.blocks):
        block.register_forward_hook(
            lambda _, __, output, index=index: (
                output.register_hook(lambda _: order.append(f"backward {index}")) and None
            )
        )
    net(batch()).backward()
    assert order == ["copy"] * 4 + ["backward 3", "copy", "backward 2", "copy", "backward 1", "copy", "backward 0"]
    assert [way for way, _ in host.copies] == ["out"] * 4 + ["in"] * 3


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_bits_do_not_change_with_dropout_and_autocast(every, autocast):
    found = []
    for net in (Stack(), wrapped(Stack(), policy="offload", every=every)):
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(batch())
        torch.rand(7)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    assert equal(*found)


class Views(nn.Module):
    """Saves views of one storage: slices, a transposed one, an expanded one, and a part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight).chunk(3, dim=1)
        scores = (q @ k.t()).softmax(-1) * x.sum(0, keepdim=True)[:, :1].expand(ROWS, ROWS)
        return scores @ v + x[:, 2:4].sum() * x


def views() -> nn.Module:
    torch.manual_seed(0)
    net = Stack(())
    net.blocks.extend(Views() for _ in range(3))
    net.forward = lambda x: net.blocks[2](net.blocks[1](net.blocks[0](net.first(x)))).square().sum()
    return net


def test_views_of_one_storage_are_copied_once_and_come_back_with_their_strides(monkeypatch):
    plain = results(views())
    net = wrapped(views(), policy="offload")
    seen: list[list[tuple[Any, ...]]] = [[], []]
    own_pack, own_unpack = Call.pack, Call.unpack

    def layout(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.dtype

    def pack(call: Call, tensor: Tensor) -> Any:
        seen[0].append(layout(tensor))
        return own_pack(call, tensor)

    def unpack(call: Call, packed: Any) -> Tensor:
        tensor = own_unpack(call, packed)
        seen[1].append(layout(tensor))
        return tensor

    host = Host(monkeypatch, net)
    monkeypatch.setattr(Call, "pack", pack)
    monkeypatch.setattr(Call, "unpack", unpack)
    assert equal(results(net), plain)
    assert sorted(map(str, seen[0])) == sorted(map(str, seen[1]))
    product = 3 * WIDTH * ROWS * FLOAT
    assert [sizes.count(product) for way, sizes in host.copies if way == "out"] == [1, 1, 1]


class InPlace(Mlp):
    """Changes what gelu has saved."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = x @ self.up
        y = torch.nn.functional.gelu(h) @ self.down
        h.add_(1.0)
        return x + scale * y


def test_a_tensor_that_is_changed_after_it_was_saved_is_an_error():
    """As in plain training; otherwise the copy would have the changed numbers."""
    nets = [Stack(()), Stack(())]
    for net in nets:
        net.blocks.extend([InPlace(32), Mlp(32)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nets[0](batch()).backward()
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(64, 32\) was changed in place"):
        wrapped(nets[1], policy="offload")(batch()).backward()


def test_a_tensor_that_is_changed_while_it_is_copied_is_an_error():
    copies = Copies(CPU)
    call, after = Call(copies, set()), Call(copies, set())
    tensor = torch.zeros(1024)
    call.pack(tensor)
    call.send()
    tensor.add_(1.0)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(1024,\) was changed in place"):
        after.send()


def test_what_stays():
    copies, owned = Copies(CPU), torch.zeros(1024)
    call = Call(copies, {owned.untyped_storage().data_ptr()})
    small, other = torch.zeros(127), torch.zeros(1024, device="meta")
    sparse, conjugate = torch.zeros(1024).to_sparse(), torch.zeros(1024, dtype=torch.complex64).conj()
    for tensor in (owned, owned.view(32, 32).t(), small, other, sparse, conjugate):
        assert call.pack(tensor) is tensor and call.unpack(tensor) is tensor
    assert isinstance(call.pack(torch.zeros(128)), offload.View)


def test_a_graph_that_stays_runs_backward_twice():
    net, plain = wrapped(Stack(), policy="offload"), Stack()
    for each in (net, plain):
        torch.manual_seed(2)
        loss = each(batch())
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_graphs_that_interleave_and_one_that_is_dropped():
    nets = wrapped(Stack(), policy="offload"), Stack()
    for net in nets:
        torch.manual_seed(2)
        net(batch())  # dropped
        one, two = net(batch()), net(2 * batch())
        one.backward()
        three = net(3 * batch())
        two.backward()
        three.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_a_dropped_graph_leaves_no_more_than_the_last_block(monkeypatch):
    net = wrapped(Stack(), policy="offload")
    host = Host(monkeypatch, net)
    with host.live:
        for _ in range(3):
            net(batch())
        gc.collect()
        assert host.live.bytes() <= net.blocks[-1].plain()
    assert host.bytes() <= net.blocks[-1].plain()


def test_a_copy_of_the_model_has_its_own_weights():
    net = wrapped(Stack(), policy="offload")
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert not other(batch()).any()
    assert net(batch()) != 0 and net.state_dict().keys() == Stack().state_dict().keys()


class FakeCuda:
    """Streams and events that note their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.inside = "main"

    def stream_of(self, name: str) -> Any:
        fake = self

        class Stream:
            def __repr__(self) -> str:
                return name

            def wait_stream(self, other: Any) -> None:
                fake.calls.append(f"{name} waits for {other}")

            def record_event(self) -> str:
                fake.calls.append(f"{name} records")
                return "event"

            def wait_event(self, event: str) -> None:
                fake.calls.append(f"{name} waits for {event}")

            def __enter__(self) -> None:
                fake.inside = name

            def __exit__(self, *_: object) -> None:
                fake.inside = "main"

        return Stream()


def test_the_order_of_streams(monkeypatch):
    """A copy waits for the work so far; memory goes back, and is read, only after the copy."""
    fake = FakeCuda()
    main, side = fake.stream_of("main"), fake.stream_of("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copies = Copies(CPU)
    copies.stream = side
    monkeypatch.setattr(Copies, "host", lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8))
    own, inside = Tensor.copy_, []
    monkeypatch.setattr(
        Tensor, "copy_", lambda self, *args, **kwargs: (inside.append((fake.inside, kwargs)), own(self, *args))[1]
    )
    tensor, calls, packed = torch.arange(256.0), list[Call](), list[Any]()
    for factor in (1, 2, 3):
        call = Call(copies, set())
        calls.append(call)
        packed.append(call.pack(tensor * factor))
        call.send()
    sends = ["side waits for main", "side records"]
    assert fake.calls == [*sends, *sends, "main waits for event", *sends, "main waits for event"]
    fake.calls.clear()
    assert torch.equal(calls[2].unpack(packed[2]), tensor * 3)
    assert fake.calls == ["main waits for event", *sends]  # of its own way out, then the block before is fetched
    fake.calls.clear()
    assert torch.equal(calls[1].unpack(packed[1]), tensor * 2)
    assert fake.calls == ["main waits for event", *sends]
    fake.calls.clear()
    assert torch.equal(calls[0].unpack(packed[0]), tensor)
    assert fake.calls == ["main waits for event"]
    assert inside == [("side", {"non_blocking": True})] * 5
