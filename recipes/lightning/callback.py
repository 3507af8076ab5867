"""Attaches a LightningModule to Echelon's trainer, and calls its hooks."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from recipes.lightning.attached import Logged
from recipes.lightning.data import refuse_ranks
from recipes.lightning.module import GRADIENT_HOOKS, find, overrides
from trainer.callback import Callback, Role
from trainer.context import Context
from trainer.data.batch import Step
from trainer.errors import ConfigError
from trainer.log import log
from trainer.metrics.named_losses import mean_of
from trainer.optim.groups import WithGroups
from trainer.parallel.forward_backward import ForwardBackward

OWN_NAMES = {"loss", "lr", "grad_norm", "loss_scale"}  # of a logged step
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "on_after_batch_transfer")
EPOCH_HOOKS = ("on_train_epoch_start", "on_train_epoch_end")


class LightningHooks(Callback):
    """Belongs to the recipe Lightning.

    The state is what schedulers of role ReduceLROnPlateau have seen, and what the end of an epoch has logged since the
    last logged step. It has the frozen parameters and the data's state, too. Each rank has its sums of the epoch. All
    else follows from the step.
    """

    role = Role.MEASURE
    open = False
    conflicts = {Role.SPLIT: "a training_step can't be cut into stages; leave one out"}

    def build_model(self, trainer: Context, build: Callable[[], nn.Module]) -> nn.Module:
        recipe = trainer.recipe
        if not hasattr(recipe, "view"):
            name = type(recipe).__name__
            raise ConfigError(f"callbacks.lightning: belongs to recipe Lightning, and this is {name}; leave it out")
        recipe.view.echelon = trainer
        for split, loader in recipe.loaders.items():
            refuse_ranks(loader, split, trainer.world)
        chosen: Any = trainer.new_optimizer
        make = chosen.args[0].make if isinstance(chosen.args[0], WithGroups) else chosen.args[0]
        recipe.own_optimizer = make == recipe.optimizer
        model = build()
        self.of_epoch: dict[str, float] = {}
        self.sums: dict[str, list[Any]] = {}  # of what training_step logs with on_epoch, and the weights
        self.objects: dict[str, Any] = {}  # metrics of torchmetrics among these
        self.replaced: dict[str, float] = {}  # numbers of the module's that have a name of Echelon's
        self.said = set[str]()  # those of the names that a line has named
        self.world, self.data = trainer.world, recipe.view.datamodule
        self.frozen: list[str] | None = None  # the parameters, of a checkpoint
        self.plateaus: dict[int, dict[str, float]] = recipe.configured.plateaus
        return model

    def wrap_forward_backward(self, trainer: Context, run: ForwardBackward) -> ForwardBackward:
        module, trainer.recipe.view.composed = find(trainer.module), True
        own = [hook for hook in GRADIENT_HOOKS if overrides(module, hook)]
        if not own:
            return run
        if trainer.scaler.is_enabled() or any("defers" in c.provides for c in trainer.callbacks.values()):
            raise ConfigError(
                f"recipe.module: {type(module).__name__}.{own[0]} reads gradients, which are scaled or not "
                "reduced yet; leave fp16 and callbacks that defer the reduction out"
            )

        def passes(data: Step, total: Callable[[], int]) -> list[Tensor]:
            losses = run(data, total)
            if not trainer.rehearsing:
                for hook in own:
                    getattr(module, hook)(*(() if hook == "on_after_backward" else (trainer.optimizer,)))
            return losses

        return passes

    def on_fit_start(self, trainer: Context) -> None:
        recipe, module = trainer.recipe, find(trainer.module)
        recipe.passes, self.epoch = 0, recipe.view.current_epoch
        recipe.view.logged.clear()
        trainer.gathered.append((partial(self._of_step, recipe.view.logged, recipe.view.of_epoch), self._name))
        self.module = module
        module.on_fit_start()
        module.on_train_start()
        module.on_train_epoch_start()
        for name, parameter in module.named_parameters():  # of a checkpoint: after hooks that have run before it
            parameter.requires_grad_(parameter.requires_grad if self.frozen is None else name not in self.frozen)
        self.open = True  # an epoch has begun, and not ended

    def _name(self, ranks: list[Any]) -> dict[str, float]:
        """Return the means over ranks of what is logged. Some names are Echelon's own."""
        means = mean_of(ranks)
        self.replaced |= {name: means[name] for name in OWN_NAMES & means.keys()}
        return {f"train/{name}": value for name, value in means.items() if name != "loss"}

    def _compare(self, metrics: Mapping[str, float]) -> None:
        """Say once that a number of the module's has a name of Echelon's, and another value."""
        for name, value in self.replaced.items():
            own = metrics.get(f"train/{name}", value)
            if name not in self.said and not math.isclose(value, own, rel_tol=1e-3, abs_tol=1e-6):
                self.said.add(name)
                line = (
                    "self.log: train/%s is Echelon's own number, and the module's %g is not logged; rename the module's"
                )
                log.warning(line, name, value)
        self.replaced = {}

    def _of_step(self, logged: Logged, of_epoch: Mapping[str, bool]) -> dict[str, list[float]]:
        """Return what training_step logs for the step."""
        return {name: both for name, both in logged.numbers().items() if of_epoch.get(name, True)}

    def on_step_end(self, trainer: Context) -> None:
        recipe, module = trainer.recipe, find(trainer.module)
        ended = recipe.view.epochs_at(trainer.step) > self.epoch
        if trainer.lag and any(overrides(module, hook) for hook in (*BATCH_HOOKS, *(EPOCH_HOOKS if ended else ()))):
            trainer.emit("on_flush")  # hooks see and change the weights of this step
        recipe.view.after_batch = True
        recipe.end_batch(module)
        recipe.passes = 0
        self._add(recipe.view.logged, recipe.view.of_epoch)
        recipe.view.logged.clear()
        if ended:
            self._end_epoch(trainer, module)
            self.epoch = recipe.view.epochs_at(trainer.step)
        recipe.view.after_batch = False
        if ended:
            self.open = not trainer.stop_reason and trainer.step != trainer.plan.max_steps
            if self.open:
                module.on_train_epoch_start()
        if trainer.metrics:  # a step that is logged
            self._compare(trainer.metrics)
            trainer.metrics |= self.of_epoch
            self.of_epoch = {}

    def _add(self, logged: Logged, of_epoch: Mapping[str, bool]) -> None:
        """Add what a step has logged with on_epoch to the sums of the epoch."""
        for name in of_epoch.keys() & logged.sums.keys():
            both = self.sums.setdefault(name, [0.0, 0])
            self.sums[name] = [total + more for total, more in zip(both, logged.sums[name], strict=True)]
        self.objects |= {name: metric for name, metric in logged.metrics.items() if name in of_epoch}

    def _end_epoch(self, trainer: Context, module: Any) -> None:
        """Call the module's hook. The values of the epoch, as means over ranks, are in the next logged step's metrics.

        A name that training_step logs with on_epoch gets `_epoch` at its end, as in Lightning.
        """
        module.on_train_epoch_end()
        logged = trainer.recipe.view.logged
        own = {f"{name}_epoch": both for name, both in plain(self.sums).items()}
        own |= {f"{name}_epoch": [float(metric.compute()), 1] for name, metric in sorted(self.objects.items())}
        self.of_epoch |= self._name(trainer.ranks.gather(own | logged.computed()))
        for metric in self.objects.values():
            metric.reset()
        self.sums, self.objects = {}, {}
        logged.clear()

    def on_validation_end(self, trainer: Context, metrics: dict[str, float]) -> None:
        trainer.recipe.configured.validated(trainer.step, metrics)

    def on_fit_end(self, trainer: Context) -> None:
        module: Any = find(trainer.module)
        if trainer.stop_reason:  # no error
            if self.open:
                module.on_train_epoch_end()
            module.on_train_end()
            module.on_fit_end()
        if self.data is not None:
            self.data.teardown("fit")
        module.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        plateaus = {str(step): values for step, values in self.plateaus.items()}
        frozen = [name for name, p in self.module.named_parameters() if not p.requires_grad]
        data = {} if self.data is None else self.data.state_dict()
        return {"plateaus": plateaus, "of_epoch": self.of_epoch, "frozen": frozen, "data": data}

    def rank_state_dict(self) -> dict[str, Any]:
        return {"sums": plain(self.sums)}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {name: list(both) for name, both in state["sums"].items()}

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Return equal parts of all sums."""
        merged: dict[str, list[float]] = {}
        for state in states:
            for name, (total, weight) in state["sums"].items():
                known = merged.get(name, [0.0, 0.0])
                merged[name] = [known[0] + total / self.world, known[1] + weight / self.world]
        return {"sums": merged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plateaus.update({int(step): values for step, values in state["plateaus"].items()})
        self.of_epoch, self.frozen = dict(state.get("of_epoch", {})), state.get("frozen")
        if self.data is not None and state.get("data"):
            self.data.load_state_dict(state["data"])


def plain(sums: Mapping[str, list[Any]]) -> dict[str, list[float]]:
    """Return sums and weights as plain numbers."""
    return {name: [float(total), float(weight)] for name, (total, weight) in sums.items()}
