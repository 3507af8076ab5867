"""Finds the largest micro-batch that fits, and halves it when memory runs out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.annotated import PositiveInt, fits
from trainer.callback import Callback, Role, Symptom, name_of
from trainer.checks.recipe import weight_of
from trainer.config.batch import split_batch
from trainer.context import Context
from trainer.cost.memory import predict_memory
from trainer.cost.setup import Cost, Setup
from trainer.data.batch import Split, Step, count_samples
from trainer.data.decisions import Decisions, refuse_fixed_split
from trainer.data.parts import Parts
from trainer.data.resize import repeat_batch
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.memory_search import bytes_of_step, drop_gradients, fails, fits_alongside, search, state_share
from trainer.rng import generators_of

KEY = "callbacks.auto_batch"
TOO_LARGE = f"{KEY}: a single sample does not fit into memory; use a smaller model or shorter samples"


class AutoBatch(Callback):
    """Chooses the micro-batch by memory. The batch stays the same, so results differ only by rounding.

    The rehearsal searches for the largest micro-batch. If a later step runs out of memory, all ranks halve it and
    retry. No pass of a step communicates: the ranks vote after all passes, and only then reduce, so a failed pass
    leaves no unfinished collective. A resume repeats the decisions, which checkpoints and `splits.jsonl` contain.
    """

    role = Role.BATCH
    remedies = {Symptom.MEMORY: [{}]}
    conflicts = {
        "own_order": "gradients are reduced after all passes of a step, not during the last; leave one out",
        "find_unused_parameters": "the ranks reduce all gradients after a step's passes; "
        "set trainer.ddp.find_unused_parameters=false or leave auto_batch out",
        "static_graph": "a pass that runs out of memory is not the graph that DDP has recorded; "
        "set trainer.ddp.static_graph=false or leave auto_batch out",
        "sync_batch_norm": "a rank whose pass runs out of memory would leave the others waiting in theirs; "
        "set trainer.sync_batch_norm=false or leave auto_batch out",
    }

    def __init__(self, max_micro: PositiveInt | None = None) -> None:
        self.max_micro = max_micro
        self.asked = 0  # the first position that this rank has not loaded or begun to load
        self.probing = False

    def cost(self) -> Cost:
        return LargestMicroBatch(max_micro=self.max_micro)

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        refuse_fixed_split(KEY, trainer.strategy.lockstep, trainer.plan.order)
        world, batch, plan = trainer.strategy.data_world, trainer.batch, trainer.plan
        share = -(-batch // world)
        self.most = min(share, self.max_micro or (share if trainer.device.type == "cuda" else plan.micro))
        self.micro = min(plan.micro, self.most)  # of the rehearsal
        gpu = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu"
        gpus = sorted(set(trainer.ranks.gather(gpu)))
        made_with = {"world": world, "batch": batch, "max_micro": self.max_micro, "micro": plan.micro, "gpus": gpus}
        self.made = Decisions(trainer.run_dir / "splits.jsonl", trainer.rank, made_with)
        name = name_of(self, trainer.callbacks)
        self.made.begin(plan.manifest, name, trainer.ranks.first)
        for decision in self.made.made:
            micro: Any = decision.value.get("micro")
            if not fits(micro, int) or not 0 < micro <= share:
                raise ConfigError(f"trainer.resume: the checkpoint has no valid decisions of {KEY}; take another one")
        if begun := self.made.made_by(plan.manifest.get("samples", 0)):
            self.micro = begun["micro"]
        self.weigh = weight_of(trainer.recipe) or count_samples
        return lambda data, total: self._passes(trainer, run, data, total)

    def split(self, trainer, position: int) -> Split:
        self.asked = max(self.asked, position + trainer.batch)
        plan, value = trainer.plan, self.made.at(position)
        times = plan.accumulate
        if value and value["micro"] != plan.micro:
            _, times = split_batch(trainer.batch, trainer.strategy.data_world, value["micro"], None, uneven=True)
        return Split(trainer.batch, trainer.strategy.data_world, times)

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        if self.made.made:  # a resume repeats decisions
            return
        self.step_bytes = bytes_of_step(trainer.strategy, state_share(trainer.new_optimizer, trainer.device))
        self.probing = True
        tried = search(self.micro, self.most, lambda micro: self._fits(trainer, run_pass, batch, micro))
        self.probing = False
        if not tried:
            raise ConfigError(TOO_LARGE)
        self.micro = tried[-1]
        probes = "of this size" if len(tried) == 1 else f"the largest that fits, up to {self.most}"
        log.info("auto_batch: micro-batches of at most %d samples (%s)", self.micro, probes)
        if trainer.device.type != "cuda" and not self.max_micro:
            log.info("auto_batch: a CPU reports no memory limit, so none is searched for; %s.max_micro", KEY)
        self._decide(trainer, trainer.plan.manifest.get("samples", 0))

    def _fits(self, trainer: Context, run_pass: Callable[[Any], None], batch: Any, micro: int) -> bool:
        """Return whether passes of `micro` samples fit on all ranks. A collective."""
        trainer.strategy.share_buffers()
        fit = fits_alongside(self.step_bytes, lambda: run_pass(repeat_batch(batch, micro, KEY)), trainer.device)
        return not self._vote(trainer, not fit)

    def _passes(self, trainer: Context, run: ForwardBackward, data: Step, total: Callable[[], int]) -> list[Tensor]:
        """Run the passes of a step on parts that fit, retry with smaller parts if not, then reduce the gradients."""
        if self.probing:
            data.reduces = False
            return run(data, total)
        if not trainer.rehearsing and (decided := self.made.made_by(trainer.samples + trainer.batch)):
            self.micro = decided["micro"]
        kept, strategy = Kept(data), trainer.strategy
        strategy.share_buffers()
        buffers = [buffer for name, buffer in trainer.module.named_buffers() if name not in strategy.constant_buffers]
        generators = generators_of(trainer.device)
        before, states = [buffer.clone() for buffer in buffers], [generator.get_state() for generator in generators]
        losses: list[Tensor] = []

        def run_parts() -> None:
            parts = Parts(kept, self.micro, self.weigh, KEY)
            losses.clear()  # those of a failed try have graphs
            losses.extend(parts.merge(run(parts, total)))

        while ranks := self._vote(trainer, fails(run_parts)):
            self._halve(trainer, ranks)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        strategy.reduce_gradients()
        return losses

    def _vote(self, trainer: Context, failed: bool) -> int:
        """Return the number of ranks that failed; if any did, drop the gradients. A collective."""
        (ranks,) = trainer.ranks.agree((int(failed),))()
        if ranks:
            drop_gradients(trainer.parameters, trainer.device)
        return ranks

    def _halve(self, trainer: Context, ranks: int) -> None:
        if self.micro == 1:
            raise ConfigError(TOO_LARGE)
        before, self.micro = self.micro, self.micro // 2
        text = "auto_batch: step %d: out of memory on %d of %d rank(s) with micro-batches of %d samples; %d from now on"
        log.warning(text, trainer.step + 1, ranks, trainer.world, before, self.micro)
        if not trainer.rehearsing:
            self._decide(trainer, trainer.samples + trainer.batch)

    def _decide(self, trainer: Context, samples: int) -> None:
        """Use the new size from the first position that no rank has loaded yet. A collective."""
        asked = max(trainer.ranks.gather(self.asked))
        last = self.made.made[-1].position if self.made.made else 0
        self.made.add(samples, max(last, asked), {"micro": self.micro})

    def on_fit_end(self, trainer) -> None:
        self.made.close()

    def decisions(self) -> dict[str, Any]:
        return self.made.state()


class Kept(Step):
    """A step that can be iterated more than once, because its batches are kept until it ends."""

    def __init__(self, step: Step) -> None:
        self.weights, self.rest = step.weights, iter(step)
        self.given: list[tuple[Any, int]] = []

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        yield from list(self.given)
        for one in self.rest:
            self.given.append(one)
            yield one
        if len(self.given) < len(self.weights):
            raise RuntimeError("auto_batch: memory ran out while a batch was copied to the device; set a smaller batch")


@dataclass(frozen=True)
class LargestMicroBatch(Cost):
    """The largest micro-batch up to `max_micro` whose step fits the memory."""

    max_micro: int | None = None

    def choose(self, setup: Setup) -> Setup:
        limit = setup.machine.memory_bytes
        if limit is None:
            return setup
        most = min(self.max_micro or setup.samples, setup.samples)
        tries = [replace(setup, settings={**setup.settings, "micro_batch": micro}) for micro in range(most, 0, -1)]
        return next((each for each in tries if predict_memory(each) <= limit), tries[-1])
