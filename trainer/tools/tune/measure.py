"""Measures on one rank what the cost model needs: the work of a sample, and what it costs to read one."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.data.resize import repeat_batch
from trainer.errors import ConfigError, DataError, printable
from trainer.parallel.batch_norm import normalises_by_batch
from trainer.parallel.blocks import find_blocks
from trainer.parallel.layout import Layout, holders
from trainer.parallel.warmup import wait
from trainer.process.environment import Place
from trainer.session import build_components
from trainer.tools.tune.trial import OWN, Over, Stopwatch, clock, ends_early, seconds_between
from trainer.trainer import Trainer

ROUNDS = 7  # of which the median counts, after one that warms up
PASSES = 3  # backward passes whose gradients are timed
ENOUGH = 10.0  # seconds of rounds, after which no further one begins


class Profile(Stopwatch):
    """Measures the passes of a single rank with its part of the batch, then times a few steps."""

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        micro = trainer.plan.micro
        sizes = sorted({max(1, micro // 4), max(1, micro // 2), max(2, micro)})
        try:
            batches = [repeat_batch(batch, size, f"callbacks.{OWN}") for size in sizes]
        except DataError:  # it can't be cut, so a pass counts as its samples alone
            sizes, batches = [micro], [batch]
        sizes, batches, self.failed = passing(run_pass, sizes, batches, micro)
        loss, model, device = trainer.loss.compute, trainer.strategy.model, trainer.device  # pyright: ignore
        calls = [(lambda made=made: run_pass(made)) for made in batches]
        calls += [(lambda made=made: loss(model, made)) for made in batches]
        took = in_turns(calls, device)
        whole, ahead = took[: len(sizes)], took[len(sizes) :]
        slope, self.pass_s = line(sizes, whole)
        forward, _ = line(sizes, ahead)
        forward = min(forward, 0.9 * slope)
        self.forward_s, self.backward_s = forward, slope - forward
        ends = zip((sizes[0], sizes[-1]), (batches[0], batches[-1]), strict=True)
        self.activation_bytes = a_sample(
            {size: saved_bytes(lambda made=made: loss(model, made), trainer.module) for size, made in ends}
        )
        self.compute = shares(lambda: loss(model, batch), trainer.parameters, device)
        self.random = len({seeded(lambda: loss(model, batch), seed) for seed in (1, 2)}) > 1
        self.cut = cuts(trainer, lambda: loss(model, batch), self.compute)
        self.began, self.optimizers = 0.0, list[float]()

    def on_before_optimizer_step(self, trainer) -> None:
        wait(trainer.device)
        self.began = time.perf_counter()

    def on_step_end(self, trainer) -> None:
        wait(trainer.device)
        self.optimizers.append(time.perf_counter() - self.began)
        super().on_step_end(trainer)


def profile(config: dict[str, Any], place: Place, warm: int, steps: int) -> dict[str, Any]:
    """Measure the workload of this rank, alone, and return its numbers as JSON."""
    own = {"run_dir": f"{config['trainer']['run_dir']}-{place.rank}"}  # one process writes a run
    components = build_components({**config, "trainer": config["trainer"] | own})
    watch = components["callbacks"][OWN] = Profile(warm, steps)
    own_device = replace(place, rank=0, world=1, local_world=1, store="")
    trainer = Trainer(**components, place=own_device, name=OWN)
    with contextlib.suppress(Over):
        trainer.fit()
    if not watch.result:
        raise ends_early(watch)
    parameters = trainer.parameters
    optimizer_s, step_s, data_s = (
        statistics.median(settled(times))
        for times in (watch.optimizers[warm:], watch.result["times"], watch.waits[warm:])
    )
    samples, passes = trainer.batch, trainer.plan.accumulate
    rehearsed = samples * (watch.forward_s + watch.backward_s) + passes * watch.pass_s
    compute = in_steps(watch.result["phases"], step_s) or rehearsed
    slower = compute / rehearsed  # in a step, memory is new and caches are cold
    return {
        "parameters": [p.numel() for p in parameters],
        "shapes": [list(p.shape) for p in parameters],
        "compute": watch.compute,
        "forward_s": watch.forward_s * slower,
        "backward_s": watch.backward_s * slower,
        "pass_s": watch.pass_s * slower,
        "optimizer_s": optimizer_s,
        "other_s": max(0.0, step_s - optimizer_s - data_s - compute),
        "data_s": data_s / samples,
        "data_cpu": min(1.0, sum(watch.worked[warm:]) / max(sum(watch.waits[warm:]), 1e-9)),
        "activation_bytes": watch.activation_bytes,
        "state_bytes": float(state_bytes(trainer)),
        "step_s": step_s,
        "random": watch.random,
        "batch_norm": normalises_by_batch(trainer.module),
        "blocks": max(0, len(watch.cut.parts) - 2),
        **watch.cut._asdict(),
        "boundary_bytes": watch.cut.boundary_bytes / trainer.plan.micro,  # of a sample
        "failed": watch.failed,
    }


def settled(times: list[float]) -> list[float]:
    """Return the later half of the steps, since memory allocation slows the first ones."""
    return times[len(times) // 2 :]


def in_steps(phases: Mapping[str, float], step_s: float) -> float:
    """Return the seconds of the passes in a step, by `step_timer`; 0 without its phases."""
    return step_s * (phases["forward"] + phases["backward"]) / phases["step"] if phases else 0.0


def passing(
    run_pass: Callable[[Any], None], sizes: Sequence[int], batches: Sequence[Any], today: int
) -> tuple[list[int], list[Any], list[str]]:
    """Return the sizes whose pass works, their batches, and lines about the others.

    The pass of a BatchNorm1d with one sample fails, for instance. Today's own size has to work.
    """
    working, failed = dict[int, Any](), list[str]()
    for size, batch in zip(sizes, batches, strict=True):
        try:
            run_pass(batch)
            working[size] = batch
        except Exception as error:
            if size == today:
                raise
            failed.append(f"micro_batch={size}: {type(error).__name__}: {printable(str(error))}")
    return list(working), list(working.values()), failed


def in_turns(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Return each call's median seconds over rounds in which calls take turns, so that noise hits all alike."""
    rounds, end = list[list[float]](), time.perf_counter() + ENOUGH
    while len(rounds) < 2 or (len(rounds) <= ROUNDS and time.perf_counter() < end):
        rounds.append([seconds(call, device) for call in calls])
    return [statistics.median(took) for took in zip(*rounds[1:])]


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return the seconds per sample and the fixed seconds per pass: least squares' slope, through the last size."""
    high, last = sizes[-1], seconds[-1]
    slope = statistics.linear_regression(sizes, seconds).slope if len(sizes) > 1 else last / high
    slope = min(max(slope, 0.5 * last / high), last / high)  # a pass is at most half fixed; noise may suggest otherwise
    return slope, last - slope * high


def shares(run: Callable[[], Tensor], parameters: Sequence[Tensor], device: torch.device) -> list[float]:
    """Return each parameter's share of a backward pass: from the previous gradient to its own."""
    times = [0.0] * len(parameters)
    for _ in range(PASSES):
        for index, each in ready(run(), parameters, device):
            times[index] += each
    return [each / (sum(times) or 1.0) for each in times]


def ready(loss: Tensor, parameters: Sequence[Tensor], device: torch.device) -> list[tuple[int, float]]:
    """Run a backward pass. Return the parameters in the order of their gradients, with the seconds between."""
    now, order, ends = clock(device), list[int](), list[Any]()

    def note(index: int) -> None:
        order.append(index)
        ends.append(now())

    with contextlib.ExitStack() as stack:
        for index, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
            stack.callback(hook.remove)
        note(-1)
        loss.backward()
    for parameter in parameters:
        parameter.grad = None
    return list(zip(order[1:], seconds_between(ends), strict=True))


def seeded(loss: Callable[[], Tensor], seed: int) -> float:
    """Return a loss whose random numbers begin at this seed; with dropout, two seeds differ."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return loss().item()


def saved_bytes(run: Callable[[], Any], module: torch.nn.Module) -> float:
    """Return the bytes that autograd keeps of a forward pass, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return float(sum(sizes.values()))


class Cut(NamedTuple):
    """The parts between which a pipeline may cut a model, and what it sends; empty if it can't be cut."""

    parts: Sequence[float] = ()  # share of the backward pass before the blocks, of each block, and after them
    part_of: Sequence[int] = ()  # the part of each trained parameter
    boundary_bytes: float = 0.0  # from one block to the next
    tied_bytes: float = 0.0  # of parameters that are used before and after the blocks


def a_sample(saved: Mapping[int, float]) -> float:
    """Return the bytes per sample, without constant ones such as autocast's copies of the weights."""
    (low, least), (high, most) = min(saved.items()), max(saved.items())
    return max(0.0, most - least) / (high - low) if high > low else most / high


def cuts(trainer: Any, run: Callable[[], Any], compute: Sequence[float]) -> Cut:
    """Return how a pipeline may cut the model: each block takes a tensor first, and returns one.

    `compute` is the share of each of the trainer's parameters in the backward pass.
    """
    sizes: list[float] = []

    def look(block: nn.Module, args: Any, result: Any) -> None:
        tensors = isinstance(result, Tensor) and args and isinstance(args[0], Tensor)
        sizes.append(float(result.nbytes) if tensors else math.inf)

    try:
        blocks = find_blocks(trainer.recipe, trainer.module, None, "tune")
    except ConfigError:
        return Cut()
    with contextlib.ExitStack() as stack, torch.no_grad():
        for block in blocks:
            stack.callback(block.register_forward_hook(look).remove)
        run()
    if not sizes or len(set(map(id, blocks))) < len(blocks) or math.isinf(max(sizes)):
        return Cut()
    block_of = {id(p): number for number, block in enumerate(blocks, 1) for p in block.parameters()}
    ends = holders(trainer.module, blocks, Layout((0, 1), len(blocks), 2))
    outside = {id(p): ends[name] for name, p in trainer.module.named_parameters() if id(p) not in block_of}
    last, trained = len(blocks) + 1, trainer.parameters
    part_of = [block_of[id(p)] if id(p) in block_of else last * outside[id(p)][0] for p in trained]
    parts = [sum(itertools.compress(compute, (own == part for own in part_of))) for part in range(last + 1)]
    tied_bytes = sum(p.nbytes for p in trained if len(outside.get(id(p), ())) == 2)
    return Cut(parts, part_of, max(sizes), float(tied_bytes))


def state_bytes(trainer: Trainer) -> int:
    state = [v for values in trainer.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return sum(2 * p.nbytes for p in trainer.parameters) + sum(tensor.nbytes for tensor in state)
