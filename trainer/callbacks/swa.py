"""Stochastic weight averaging: the equal average of weights along the last part of a run, for validation and export."""

from collections.abc import Iterable
from contextlib import closing, suppress
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from trainer.callback import Callback, Role
from trainer.config.duration import Duration, Periods
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.data.batch import Micro
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.averaged_model import AveragedModel
from trainer.parallel.batch_norm import average_statistics, cumulative, layers_with_statistics, statistics
from trainer.parallel.strategy import OutputElsewhere
from trainer.rng import GOLDEN, MASK, UPDATE_BN, generators_of, mix

KEY = "callbacks.swa"
SHARE = 0.75  # fraction of the run before the average begins (Izmailov et al. 2018, section 4)


class SWA(Callback):
    """Averages the weights of some steps equally (Izmailov et al. 2018, arXiv:1803.05407).

    BatchNorm's running statistics of the average come from a pass over the batches of the run's first steps, before a
    validation or a checkpoint. It does not affect the training.
    """

    role = Role.AVERAGE
    conflicts = {
        "bf16_weights": "the average would be stored in bf16, which is too coarse for most of its changes; use "
        "trainer.master_weights=true"
    }

    def __init__(
        self, start: int | str | None = None, every: int | str = "1 epochs", update_bn: int | str = "1 epochs"
    ) -> None:
        self.knobs = {"start": start, "every": every, "update_bn": update_bn}
        for name, given in self.knobs.items():
            if given is not None:
                Duration.parse(given, f"{KEY}.{name}")
        if Duration.parse(every, f"{KEY}.every").amount == 0:
            raise ConfigError(f"{KEY}.every={every}: must be more than 0")
        self.restored: dict[str, Any] = {}
        # On the CPU, and changed in place, so that a rollback restores them.
        self.averaged = torch.zeros((), dtype=torch.int64)  # weights in the average
        self.updated = torch.zeros((), dtype=torch.int64)  # likewise, when BatchNorm's statistics were computed

    def cost(self) -> Cost:
        return Cost(copies=1, left_out="its passes over the weights and over training data are not modelled")

    def on_fit_start(self, trainer) -> None:
        self.start, self.periods = self._periods(trainer)
        self._refuse_end(trainer)
        self.model = AveragedModel(trainer.strategy, trainer.module)
        self.layers = layers_with_statistics(self.model.module)
        self.samples = self._samples(trainer) if self.layers else 0
        self.step = trainer.step - trainer.lag  # the last step that was considered
        if self.restored and self.step < self.start:
            log.warning("swa: the average of the checkpoint began before step %d, and is dropped", self.start)
        elif self.restored:
            self.model.module.load_state_dict(self.restored["average"])
            self.averaged.copy_(self.restored["averaged"])
            self.updated.copy_(self.restored["updated"])
            trainer.eval_model = self.model.module
        self.restored = {}

    def on_step_end(self, trainer) -> None:
        self._follow(trainer)

    def on_flush(self, trainer) -> None:
        self._follow(trainer)
        if self.samples and self.updated != self.averaged and trainer.stop_reason != "signal":
            self._update_bn(trainer)
        if self.averaged:  # it was updated some steps ago, and a pass has changed them
            self.model.copy_buffers(self.layers if self.samples else ())

    def _follow(self, trainer: Context) -> None:
        step = trainer.step - trainer.lag
        if step == self.step:
            return
        self.step = step
        if step >= self.start and self.periods.end_at(step):
            self.model.update(1 / (int(self.averaged) + 1))
            self.averaged += 1
            trainer.eval_model = self.model.module

    @torch.no_grad()
    def _update_bn(self, trainer: Context) -> None:
        """Compute the statistics, unless a stop signal ends the pass: then they stay as they are. A collective."""
        tensors = [tensor for layer in self.layers for tensor in statistics(layer)]
        before = [tensor.clone() for tensor in tensors]
        cuda = [trainer.device] if trainer.device.type == "cuda" else []
        batches = trainer.loader.first_batches(self.samples, "updating BatchNorm")
        with torch.random.fork_rng(cuda), cumulative(self.layers), closing(batches):
            whole = self._run_passes(trainer, batches)
        if whole:
            average_statistics(self.layers, peers(trainer))
            self.updated.copy_(self.averaged)
        else:
            torch._foreach_copy_(tensors, before)
            trainer.stop_reason = "signal"

    def _run_passes(self, trainer: Context, batches: Iterable[Micro]) -> bool:
        """Run the model forward on each batch, equally often on all ranks; return False if a stop signal came."""
        loss, generators = trainer.precision.cast(trainer.recipe.loss), generators_of(trainer.device)
        key = mix(trainer.options.seed, UPDATE_BN, trainer.strategy.data_rank)
        for number, micro in enumerate(batches):
            stopping, bad = trainer.ranks.agree((int(bool(trainer.signals.name)), int(micro.batch is None)))()
            if stopping:
                return False
            if bad:  # a rank could read no sample of its batch
                continue
            for generator in generators:
                generator.manual_seed((key + number * GOLDEN) & (MASK >> 1))
            with suppress(OutputElsewhere):
                loss(self.model.module, micro.batch)
            trainer.heartbeat.beat()
        return True

    def _periods(self, trainer: Context) -> tuple[int, Periods]:
        """Return the first step whose weights may count, and the periods from there on."""
        plan = trainer.plan
        start, key = self.knobs["start"], f"{KEY}.start"
        if start is not None:
            given, first = Duration.parse(start, key), plan.step_after(key, start)
            whole = given.unit == "steps"
            samples = first and plan.samples_at(first) if whole else given.samples(key, plan.batch, plan.epoch_samples)
        elif plan.max_steps is None:
            raise ConfigError(f"{key}=null: must know the end of the run; give trainer.max_steps or a duration")
        else:
            samples = Fraction(SHARE) * plan.samples_at(plan.max_steps)
            first = plan.step_at(samples)
        every = Duration.parse(self.knobs["every"], f"{KEY}.every")
        return first, plan.periods(f"{KEY}.every", every, first if every.unit == "steps" else samples)

    def _refuse_end(self, trainer: Context) -> None:
        plan, most = trainer.plan, trainer.plan.max_steps
        first = self.start or plan.step_after(f"{KEY}.every", self.knobs["every"])
        if most is None:
            return
        if first > most:
            name = "start" if self.start else "every"
            raise ConfigError(
                f"{KEY}.{name}={self.knobs[name]}: the first weights to average are those of step {first}, and the "
                f"run ends at step {most}; give an earlier one, or leave swa out"
            )
        count = min(most - first, self.periods.passed(most) - self.periods.passed(first)) + 1
        log.info("swa: averages the weights of %d steps: %d, then every %s", count, first, self.knobs["every"])

    def _samples(self, trainer: Context) -> int:
        """Return the number of samples in the pass for BatchNorm, in whole steps."""
        key, given, plan = f"{KEY}.update_bn", self.knobs["update_bn"], trainer.plan
        steps = Duration.parse(given, key).steps(key, trainer.batch, plan.epoch_samples)
        if steps and plan.order is None:
            raise ConfigError(
                f"{key}={given}: the model has BatchNorm, and recipe.data('train') is an iterable, which can't be "
                "read a second time during the run; return a Dataset or shards, or set update_bn=0"
            )
        return steps * trainer.batch

    def state_dict(self) -> dict[str, Any]:
        if not self.averaged:
            return {}
        state = self.model.module.state_dict()
        return {"average": state, "averaged": self.averaged, "updated": self.updated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


def peers(trainer: Context) -> dist.ProcessGroup | None:
    """Return the group of ranks with the same layers and other data; None if there is no other rank."""
    if trainer.world == 1:
        return None
    strategy = trainer.strategy
    return dist.group.WORLD if strategy.data_world == trainer.world else strategy.replicas
