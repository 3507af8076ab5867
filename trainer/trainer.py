"""The training loop: all that every run needs. A callback has all that only some runs need."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from trainer import training_state
from trainer.annotated import PositiveInt, called, check_arguments
from trainer.callback import HOOKS, UNLOGGED, Callback, Gathered, Role, overrides
from trainer.callback_checks import (
    SAVED,
    numbers_only,
    owner,
    refuse_endless,
    refuse_new_attributes,
    refuse_other_value,
    saved,
)
from trainer.checkpoint.pretrained import load_weights
from trainer.comm.affinity import bind_to_cores
from trainer.comm.device import has_failed
from trainer.comm.phases import Phase, during, marker, running
from trainer.comm.ranks import Ranks, in_collective
from trainer.comm.reduce import AllReduce, Reduce
from trainer.config.options import DataOptions, Options
from trainer.data.bad_samples import BadSamples, allowed
from trainer.data.batch import Micro, Split, Step, count_samples
from trainer.data.iterable import warn_of_same_batches
from trainer.data.loader import Loader
from trainer.data.source import size_of
from trainer.errors import NOT_FINITE, ConfigError, exit_code
from trainer.files import remove_unused
from trainer.forward_backward import Accumulate, ForwardBackward
from trainer.interactive import live
from trainer.interactive.again import Again, places_of, prepare
from trainer.interactive.dry_run import DryFolder
from trainer.interactive.names import by_name
from trainer.interactive.predictions import Predictions
from trainer.log import log, log_to_terminal, stop_log
from trainer.monitors import replica_check
from trainer.monitors.named_losses import NamedLosses, combined
from trainer.monitors.train_loss import TrainLoss
from trainer.optim.factories import adamw
from trainer.optim.groups import Groups, ParameterRules, make_optimizer
from trainer.optim.made import refuse_state_elsewhere
from trainer.optim.rates import RATE, Rates
from trainer.optim.schedule import Constant, Schedule
from trainer.parallel import sparse
from trainer.parallel.attributes import copied, note_changes, owners, tensors_kept
from trainer.parallel.batch_norm import across_ranks
from trainer.parallel.ddp import DDP
from trainer.parallel.frozen import TRAINS, changed, follow, followed, refuse_fixed, refuse_in_pass, refuse_unheld
from trainer.parallel.state_fits import refuse_too_large
from trainer.parallel.strategy import SingleDevice, Strategy, clip_values, to_device, trained
from trainer.parallel.torch_calls import stepper
from trainer.parallel.warmup import buffers_kept
from trainer.plan import Plan, RunSpec
from trainer.precision import Precision
from trainer.process.crash import note_crash, read_summary
from trainer.process.environment import Place, detect
from trainer.process.heartbeat import Heartbeat
from trainer.process.signals import StopSignals
from trainer.recipe_checks import (
    CheckedLoss,
    build_model,
    check_rates,
    parameters_elsewhere,
    refuse_complex,
    refuse_no_tensors,
    refuse_untrained,
    try_summary,
    weight_of,
)
from trainer.rng import GOLDEN, MASK, STEP, generators_of, mix
from trainer.run_dir import make_run_dir, nothing_left, start_log
from trainer.summary import report, tell_place
from trainer.timeouts import STILL
from trainer.validation import Evaluator

# Attributes that `fit` adds.
BY_FIT = {"accepted", "attributes", "buckets", "data", "grad_norm", "losses", "saved_at", "signals", "started"}
BY_FIT |= {"stream", "validated_at"}


class Trainer:
    """Owns the model, the optimizer and the step counter; everything is a plain attribute.

    Args:
        recipe: The model, the data and the loss (see `trainer.recipe.Recipe`).
        callbacks: Name -> callback, or a list, which names each after its class; the order here has no effect.
        optimizer: From groups of parameters, as torch's optimizers take them.
        schedule: Factor on the optimizer's learning rates.
        batch: Samples per optimizer step, over all ranks; `micro_batch` of them at a time per rank, `accumulate` times.
        place: This process among the ranks; None looks for a launcher's variables.
        name: Of the run's folder.
        spec: The decisions of a launcher; None: rank 0 decides.

    Raises:
        ConfigError, DataError: for what can't work, before any step.
    """

    rehearsing = False  # passes are discarded
    accepted = False  # nothing can refuse the run any more
    on_accepted: Callable[[], Any] = staticmethod(lambda: None)  # called as it is accepted
    on_error: Callable[[BaseException], Any] = staticmethod(lambda error: None)  # called before a failed run's clean-up
    end_failed: Callable[[BaseException], Any] = staticmethod(lambda error: None)  # ends a process whose device failed
    reduce: Reduce | None = None  # the chain, where a callback has wrapped it
    typed: Mapping[str, Any] = MappingProxyType({})  # settings of the command, which all ranks must share
    argv: Sequence[str] | None = None  # the arguments, for the command that goes on; None: made in Python
    attributes = 0  # of this object, when they were last compared

    @check_arguments("")
    def __init__(
        self,
        recipe: Any,
        callbacks: Mapping[str, Callback] | Iterable[Callback] | None = None,
        optimizer: Callable[[Groups], Optimizer] = adamw,
        schedule: Schedule | Any = None,
        *,
        batch: PositiveInt,
        micro_batch: PositiveInt | None = None,
        accumulate: PositiveInt | None = None,
        options: Options | None = None,
        data: DataOptions | None = None,
        place: Place | None = None,
        name: str = "run",
        spec: RunSpec | None = None,
    ) -> None:
        self.recipe, self.batch, self.name, callbacks = recipe, batch, name, by_name(callbacks)
        self.dry = DryFolder(options or Options(), callbacks)
        self.options = options = self.dry.options
        place = place or detect(os.environ, options.devices, options.nodes)
        self.make_again = Again(partial(
            self.__init__, recipe, callbacks, optimizer, schedule, batch=batch, micro_batch=micro_batch,
            accumulate=accumulate, data=data, place=place, name=name,
        ), callbacks)  # fmt: skip
        self.ranks = Ranks(place, options.accelerator, options.backend, options.timeout_s)
        log_to_terminal(self.ranks.rank)
        self.rank, self.world, self.device = self.ranks.rank, self.ranks.world, self.ranks.device
        with ExitStack() as refused:
            refused.callback(self.dry.close)
            refused.callback(self.ranks.close)  # so that peers that wait for this rank get an error
            self.precision = Precision(
                options.precision, self.device, options.deterministic, self.ranks.each, options.master_weights
            )
            self.plan = Plan(
                recipe, self.dry.callbacks, schedule or Constant(), settings=self.typed,
                batch=batch, micro_batch=micro_batch, accumulate=accumulate, data=data or DataOptions(),
                options=options.with_precision(self.precision.label), place=place, each=self.ranks.each, spec=spec,
            )  # fmt: skip
            self._open_run(refused)
            refused.callback(self.saver.close)
            self.undo = refused.enter_context(ExitStack())
            bind_to_cores(self.ranks, options.affinity)  # before data workers fork
            self._set_hooks()
            self._build(optimizer)
            refused.pop_all()

    def _open_run(self, refused: ExitStack) -> None:
        refused.callback(remove_unused)
        run_dir = None if self.rank else make_run_dir(self.plan, self.name)
        found = run_dir and [str(run_dir), nothing_left(self.plan, run_dir)]
        folder, self.ended = self.ranks.first(found)
        self.run_dir = Path(folder)
        self.places = places_of(self)
        claim = training_state.claim(self, refused)  # before the log: another process may write this run
        if not self.ended:
            start_log(self.run_dir, self.rank)
        self.heartbeat = Heartbeat(os.environ.get("ECHELON_HEARTBEAT", ""))
        limit = allowed(self.plan.data.max_bad, self.plan.epoch_samples or 0)
        self.quarantine = BadSamples(self.run_dir / "quarantine.jsonl", limit, self.ranks.gather, self.rank)
        self.saver = training_state.make_saver(self, claim)
        self.interval = training_state.make_interval(self)
        self.settings: dict[str, Any] = {}  # of the config, for the manifest
        self.step, self.samples, self.seconds = 0, 0, 0.0  # done so far; `samples` is the position in the data
        self.lag, self.validated_step = 0, -1  # lag: steps by which the weights are behind, while a callback defers
        self.bad, self.requests, self.weight = 0, [0, 0, 0], 0  # of this step, summed over ranks
        self._sums: Callable[[], tuple[int, ...]] | None = None
        self.metrics: dict[str, float] = {}  # numbers of this step, if it is one to log
        self.last_metrics = self.metrics  # of the last logged step
        self.gathered: list[Gathered] = []  # numbers of this rank that `_measure` exchanges with the loss
        self.validation: dict[str, float] = {}  # of the last validation, which was at `validated_step`
        self.loaded: tuple[int, int] | None = None  # the step, and the last one validated, of the checkpoint resumed
        self.bests: list[dict[str, Any]] = []  # validations that were the best; the newest last
        self.stop_reason, self.logged = "", True  # logged: this step's numbers are measured
        self.fitted, self.closed, self.train_loss = False, False, TrainLoss(self.ranks)
        self.summary: dict[str, Any] = {}  # of the finished run, on rank 0
        refused.push(self._report_error)
        if self.plan.epoch_samples and self.batch > self.plan.epoch_samples:
            log.warning(
                "batch=%d: recipe.data('train') has %d samples, so a step takes each sample %.4g times",
                self.batch, self.plan.epoch_samples, self.batch / self.plan.epoch_samples,
            )  # fmt: skip

    def _set_hooks(self) -> None:
        self.callbacks = self.plan.callbacks
        if idle := [n for n, c in self.callbacks.items() if c.communicates and self.world == 1]:
            log.info("one rank, nothing to communicate: %s will do nothing", ", ".join(idle))
        active = [callback for name, callback in self.callbacks.items() if name not in idle]
        self.defers = any("defers" in callback.provides for callback in active)
        own = {hook: [getattr(c, hook) for c in active if overrides(c, hook)] for hook in HOOKS}
        own[UNLOGGED] = [call for call in own["on_step_end"] if not hasattr(call, "only_logged")]
        self.hooks: dict[str, list[Callable[..., Any]]] = own
        if self.world > 1 and self.options.check_replicas_every:
            for hook in ("on_step_end", UNLOGGED):
                self.hooks[hook].append(replica_check.check)

    def _build(self, optimizer: Callable[[Groups], Optimizer]) -> None:
        torch.manual_seed(self.options.seed)
        self.ddp = self.options.ddp.arguments(self.device.type == "cuda")
        self.new_optimizer: Callable[[nn.Module], Optimizer] = partial(make_optimizer, optimizer)
        build = partial(self._build_model, optimizer)
        for hook in self.hooks["build_model"]:
            build = partial(self._make, "build_model", hook, build)
        module = to_device(build(), self.device)
        if self.options.sync_batch_norm:
            module = across_ranks(module, self.world, self.device)
        if not module.training:  # as `from_pretrained` leaves it; parts that the recipe has set to eval stay so
            module.train()
        self.module = self._wrap("wrap_model", self.precision.convert(module))
        self.eval_model = self.global_model = self.module  # is validated, is saved
        self.loss = self._checked_loss()
        refuse_untrained(self.module)
        self.parameters = trained(self.module)
        if self.world > 1 and (self.hooks["wrap_reduce"] or sparse.sparse_weights(self.module)):  # else DDP's, in C++
            self.reduce = self._wrap("wrap_reduce", AllReduce(self.ranks.new_group()))
        distribute = next(
            (partial(self._make, "distribute", hook) for hook in self.hooks["distribute"]), self._distribute
        )
        self.strategy: Strategy = distribute(self.module)
        self.parameters = self.strategy.parameters
        made = make_optimizer(optimizer, self.module, self.rules)
        self._refuse_sparse(made)
        made = self.precision.wrap_optimizer(made, self.module, self.options.seed, lambda: self.step)
        self.optimizer = self._wrap("wrap_optimizer", made)
        self._refuse_too_large()
        self.clips = self.options.clip_norm is not None or self.options.clip_value is not None
        self.rates, self.followed = Rates(self.plan.rate, self.optimizer), followed(self.module, self.world)
        self.trains = list(map(TRAINS, self.followed))
        self.scaler, self.generators = self.precision.scaler, generators_of(self.device)
        self.seed_base = mix(self.options.seed, STEP, self.strategy.data_rank)
        self.passes = Accumulate(self.loss, self.strategy, self.scaler)
        self.forward_backward: ForwardBackward = self._wrap("wrap_forward_backward", self.passes)
        self._open_loader()
        if self.plan.resumed:
            training_state.refuse_other_model(self, self.plan.resumed)
        self._try_recipe()
        self._compose()
        self.own = {*vars(self), "own"}

    def _checked_loss(self) -> CheckedLoss:
        if self.options.clip_value is not None:
            refuse_complex(self.module, "trainer.clip_value", "clips real numbers")
        if self.precision.scaler.is_enabled():
            refuse_complex(self.module, "trainer.precision=fp16", "scales real gradients")
        named = NamedLosses(self.recipe.loss, lambda: None if self.rehearsing else self.step)
        self.gathered.append((lambda: named.sums(self.data.weights), combined))
        elsewhere = parameters_elsewhere(self.recipe, self.module)
        weight = weight_of(self.recipe) or count_samples
        return CheckedLoss(self.precision.cast(named), weight, self.defers, elsewhere)

    def _build_model(self, optimizer: Callable[[Groups], Optimizer]) -> nn.Module:
        """Return the recipe's model; find its groups, and freeze, before callbacks cut it or wait for gradients."""
        model = build_model(self.recipe)
        refuse_no_tensors(model)
        self.rules = ParameterRules(optimizer, self.recipe, model)
        return model

    def _refuse_sparse(self, optimizer: Optimizer) -> None:
        """Refuse sparse gradients of an embedding, if a callback or a setting takes dense ones."""
        measures = (Role.MEASURE, Role.OBSERVE)
        hooks = {name: sparse.HOOKS[:1] if c.role in measures else sparse.HOOKS for name, c in self.callbacks.items()}
        dense = [n for n, own in hooks.items() if any(getattr(self.callbacks[n], h) in self.hooks[h] for h in own)]
        nccl = self.world > 1 and self.ranks.backend == "nccl"
        sparse.refuse_sparse(self.module, optimizer, dense, self.precision.label, nccl)

    def _refuse_too_large(self) -> None:
        """Refuse a state that does not fit, while the weights are all of it that is there."""
        roles = {role for callback in self.callbacks.values() for role in (callback.role, *callback.also)}
        refuse_too_large(
            self.strategy, self.module, self.new_optimizer, self.ranks,
            averaged=Role.AVERAGE in roles, in_backward=Role.OPTIMIZER in roles,
        )  # fmt: skip

    def _open_loader(self) -> None:
        plan, strategy, options = self.plan, self.strategy, self.options
        self.loader = Loader(
            plan.source, plan.order, Split(self.batch, strategy.data_world, plan.accumulate), plan.data,
            validation=plan.validation, rank=strategy.data_rank, seed=options.seed, timeout_s=options.timeout_s,
            device=self.device, ranks_on_node=self.ranks.place.local_world,
            collate=getattr(self.recipe, "collate", default_collate), weight=weight_of(self.recipe),
        )  # fmt: skip
        self.evaluator = Evaluator(
            self.recipe, "val", self.loader.validations(), self.ranks, self.precision,
            samples=size_of(plan.validation),
            max_bad=plan.data.max_bad, replicas=strategy.replicas, lockstep=strategy.lockstep,
            data_rank=strategy.data_rank, stopping=lambda: self.fitted and self.signals.name, beat=self.heartbeat.beat,
        )  # fmt: skip

    def fit(self, max_steps: int | None = None, max_epochs: float | None = None) -> dict[str, Any]:
        """Train to the end, or until stopped. Weights, optimizer and callbacks are left as the last step made them.

        A further `fit` goes on from the run's last checkpoint, up to other limits if these are given.

        Returns:
            The content of summary.json, on every rank.

        Raises:
            ConfigError: A further `fit` can't go on.
        """
        prepare(self, max_steps, max_epochs)
        refuse_endless(self.plan.max_steps, self.callbacks)
        self.fitted = True
        with StopSignals() as self.signals, ExitStack() as every:  # last first, also if one of them raises
            note = partial(self.ranks.note_failure, RuntimeError, self.run_dir / "logs")
            self.signals.on_inspect = note
            if self.world > 1:
                no_log = self.heartbeat.file or self.ended
                stacks = None if no_log else (self.run_dir / "logs" / f"rank{self.rank}.log").open("a")
                self.heartbeat.watch(STILL * self.options.timeout_s, note, stacks)
            every.callback(remove_unused)
            for end in (self.heartbeat.close, self.saver.close, self.loader.close, self.quarantine.file.close):
                every.callback(end)
            every.enter_context(self.undo)
            for end in reversed(self.hooks["on_fit_end"]):
                every.callback(end, self)
            every.push(self._report_error)  # first: what follows may wait for a device that never answers
            self._start()
            self._run_steps()
            if not self.ended:
                self._finish()
            if self.stop_reason == NOT_FINITE:
                raise self.train_loss.refusal(self.step, self.ranks.first(str(self.checkpoint or "")))
        with StopSignals():  # a launcher may send one to all as the first of them ends
            self.summary = self.ranks.first(self.summary or read_summary(self.run_dir / "summary.json"))
            self.close()
        self.closed = True
        return self.summary

    def evaluate(self, split: str = "val") -> dict[str, float]:
        """Return the metrics over all samples of `recipe.data(split)`, named `SPLIT/METRIC`. A collective."""
        return live.evaluate(self, split)

    def predict(self, split: str = "val") -> Predictions:
        """Return what `recipe.predict` gives for all samples of `recipe.data(split)`, in order. A collective."""
        return live.predict(self, split)

    def _report_error(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        tell_place(error, self)
        for call in self.hooks["on_error"] if self.fitted else ():
            try:
                call(self, error)
            except Exception:
                log.exception("%s.on_error failed", owner(call, self.callbacks))  # peers still wait for the report
        self.on_error(error)
        refused = not self.accepted and exit_code(error) != 1
        if isinstance(error, Exception) and not (refused or self.ended):
            done = training_state.done(self)
            note_crash(self.run_dir, error, self.rank, self.world, done, follows=in_collective(error))
        self.ranks.note_failure(kind, self.run_dir / "logs")
        if has_failed(self.device):
            self.end_failed(error)

    def __repr__(self) -> str:
        return called(self, "name", "batch", "step", "world")

    def close(self) -> None:
        """End the process groups. The weights stay in `module`."""
        # DDP goes first: a reducer that holds a group last waits, with the GIL, for a thread that may wait for the GIL.
        self.strategy.unwrap()
        self.ranks.leave()
        stop_log()
        self.dry.close()

    def _start(self) -> None:
        if self.ended:
            return training_state.load_ended(self, self.ended)
        stop = math.inf if self.plan.max_steps is None else self.plan.samples_at(self.plan.max_steps)
        split_at = next((partial(self._split, split) for split in self.hooks["split"]), None)
        self.stream = self.loader.train(self.plan.manifest.get("samples", 0), split_at, stop)
        first = next(self.stream)  # data that can't be used is refused before anything changes
        if self.world > 1 and self.plan.order is None:
            warn_of_same_batches(first.peek(), self.strategy.data_rank, self.ranks.gather)
        if self.world > 1 or self.hooks["rehearse"]:
            self._rehearse(Micro(first.peek(), first.weights[0], [], []))
        self.buckets = self.strategy.buckets()
        self.stream = self._wrap("wrap_batches", chain(iter([first]), self.stream))
        if self.world > 1:
            self.stream = map(self._laid_out, self.stream)
        del first  # an exhausted iterator lets its data go
        if self.plan.resumed:
            training_state.load(self, self.plan.resumed)
            self.stream = note_changes(self.stream, self.recipe, self.module)
        elif self.options.init_from:
            load_weights(self.module, self.options.init_from)
        now = time.monotonic()
        self.started, self.saved_at, self.validated_at = now - self.seconds, now, now
        if self.plan.max_steps is not None and self.step >= self.plan.max_steps:
            self.stop("max_steps")
        self.heartbeat.beat(self.step)
        training_state.refuse_superseded(self)
        self.emit("on_fit_start")
        if not (self.stop_reason and training_state.is_saved(self)):  # else there is nothing to do
            self.accepted = True
            self.on_accepted()
            training_state.leave_newer(self)
            training_state.validate_again(self)
        self._compose()

    def _distribute(self, model: nn.Module) -> Strategy:
        if self.world == 1:
            return SingleDevice(model)
        return DDP(model, self.rank, self.world, self.device, self.ddp, self.reduce, lambda: self.step)

    def _split(self, hook: Callable[..., Split], position: int) -> Split:
        split = self._make("split", hook, position)
        if (split.samples, split.world) != (self.batch, self.strategy.data_world):
            wanted = f"batch={self.batch} over {self.strategy.data_world} rank(s)"
            raise ConfigError(f"split: returned {split}; split {wanted}")
        return split

    def _rehearse(self, first: Micro) -> None:
        """Run a few passes on the `first` micro-batch and discard their gradients, so that the buckets are final.

        Buckets decide the order of summation, so the last bits. A resumed run then has the same bits.
        """

        def run_pass(batch: Any) -> None:
            if running.clock is not self.clock:  # a callback that measures has started it
                self._compose()
            weight = first.weight if batch is first.batch else self.loss.weight(batch)
            data = Step([Micro(copied(batch), weight, [], [])])  # `loss` may take a member out of it
            with tensors_kept(owners(self.recipe, self.module).values()):
                self.forward_backward(data, lambda: weight * self.strategy.data_world)
            self.optimizer.zero_grad(set_to_none=True)

        self.rehearsing = True
        with buffers_kept(self.module):
            self.strategy.warm_up(partial(run_pass, first.batch))
            for rehearse in self.hooks["rehearse"]:
                rehearse(self, run_pass, first.batch)
        self.rehearsing = False

    def _run_steps(self) -> None:
        while not self.stop_reason:
            if self.mark:
                self.mark(Phase.DATA)
            data = next(self.stream)
            if running.clock is not self.clock:  # a profiler has started or stopped it
                self._compose()
            if self.mark:
                self.mark(Phase.CALLBACKS)
            self._train_step(data)
            self._after_step()
            if self.step == self.heartbeat.began + 2:  # overlap has made its state by now
                training_state.reserve(self)

    def _compose(self) -> None:
        """Put together what a step calls, without what this run does not use."""
        self.clock, self.mark, optimizer = running.clock, marker(), self.optimizer
        self.passes.mark = self.mark
        self.before_update: list[Callable[[], Any]] = [partial(self.mark, Phase.OPTIMIZER)] if self.mark else []
        self.update: Callable[[], Any] = stepper(optimizer)
        if self.scaler.is_enabled():
            self.before_update.append(partial(self.scaler.unscale_, optimizer))
            self.update = self._scaled_update
        if self.hooks["on_before_optimizer_step"]:
            self.before_update.append(partial(self.emit, "on_before_optimizer_step"))

    def _scaled_update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _train_step(self, data: Step) -> None:
        for generator in self.generators:
            generator.manual_seed((self.seed_base + self.step * GOLDEN) & (MASK >> 1))
        if not self.rates.settled or list(map(RATE, self.optimizer.param_groups)) != self.rates.given:
            self.rates.put(self.step + self.plan.ahead)
        # `_agree` begins one int64 all-reduce, alongside the first forward pass.
        self.data, self.losses = data, self.forward_backward(data, self._agree(data))
        for call in self.before_update:
            call()
        if list(map(TRAINS, self.followed)) != self.trains:
            self._follow_frozen()
        if self.clips or self.logged:
            self._clip()
        self.update()
        for p in self.parameters:
            p.grad = None  # what zero_grad does, at a tenth of its cost
        self.step, self.samples = self.step + 1, self.samples + self.batch

    def _laid_out(self, data: Step) -> Step:
        """Return the data of the next step, once what trains in it is laid out over the ranks."""
        if list(map(TRAINS, self.followed)) != self.trains:
            self._follow_frozen(data)
        return data

    def _follow_frozen(self, data: Step | None = None) -> None:
        """Train what is not frozen any more.

        Args:
            data: Of the step that begins; None: the change came inside its passes.
        """
        what, step = changed(self.module, self.followed, self.trains), self.step + 1
        measures = (Role.MEASURE, Role.OBSERVE)
        refuse_fixed(what, step, {n: c for n, c in self.callbacks.items() if c.role not in measures}, self.hooks)
        refuse_unheld(what, step, self.module, self.optimizer)
        if data is None:
            refuse_in_pass(what, step, self.world)
        rehearse = data and partial(self._rehearse, Micro(data.peek(), data.weights[0], [], []))
        follow(self.strategy, self.module, rehearse)
        self.trains = list(map(TRAINS, self.followed))
        self.buckets = self.strategy.buckets()

    def _clip(self) -> None:
        """Clip the gradients by their norm or by value. The norm before is `grad_norm`, of a step that is logged."""
        if self.options.clip_norm is not None or self.logged:
            self.grad_norm = self.strategy.clip(self.options.clip_norm)
        if self.options.clip_value is not None:
            clip_values(self.parameters, self.options.clip_value)

    def _agree(self, data: Step) -> Callable[[], int]:
        """Start to sum over ranks what they ask the step to end with. Return what waits for the weight of its items.

        The requests are to stop, to save and to validate. The clock is rank 0's.
        """
        done, now, plan = self.step + 1, time.monotonic(), self.plan
        self.logged = done % self.options.log_every_steps == 0 or done == plan.max_steps
        due = (now - self.saved_at >= plan.save_s, now - self.validated_at >= plan.validate_s)
        own = (len(data.bad), bool(self.signals.name), *((0, 0) if self.rank else due), sum(data.weights))
        if self.world == 1:
            self.bad, *self.requests, self.weight = own
            return partial(int, self.weight)
        self._sums = self.ranks.agree(own)
        return self._total_weight

    def _total_weight(self) -> int:
        """Wait for the sums; return the weight of all ranks' items."""
        if self._sums is not None:
            self.bad, *self.requests, weight = self._sums()
            self.weight = weight * self.strategy.data_world // self.world  # ranks with the same data count once
            self._sums = None
        return self.weight

    def _after_step(self) -> None:
        if self.mark:
            self.mark(Phase.CALLBACKS)
        if self._sums is not None:  # passes of a callback's own have not waited for them
            self._total_weight()
        self.metrics = self._measure() if self.logged else {}
        if self.logged:
            self._end_logged_step()
        else:
            for call in self.hooks[UNLOGGED]:
                call(self)
        if len(vars(self)) != self.attributes:
            self._check_callbacks()
        self.last_metrics = self.metrics if self.logged else self.last_metrics
        if self.bad:
            assert self.plan.epoch_samples
            epoch = (self.samples - 1) // self.plan.epoch_samples
            self.quarantine.take(self.step, epoch, self.data.bad, self.strategy.data_rank)
        (stop, save, validate), plan = self.requests, self.plan
        if stop or (self.world == 1 and self.signals.name):
            self.stop("signal")
        if self.step == plan.max_steps:
            self.stop("max_steps")
        validate |= (self.step + plan.validate_ahead) % plan.validate_steps == 0
        save |= self.step % plan.save_steps == 0
        if validate and self.stop_reason != "signal":  # else the resumed run validates
            save |= self.validate()
        if save and not self.stop_reason:  # `_finish` saves the last step
            training_state.save(self)
        self.saver.check(ends=bool(self.stop_reason))
        if self.heartbeat.watched:
            self.heartbeat.beat(self.step)

    def _measure(self) -> dict[str, float]:
        """Measure the numbers of this step. Waits for the device; a collective."""
        self.seconds = time.monotonic() - self.started
        metrics = self.train_loss.measure(self.losses, self.data.weights, self.step, self.gathered)
        if self.train_loss.since is not None and not training_state.is_finite(self):
            self.stop(NOT_FINITE)
        metrics["train/lr"] = self.optimizer.param_groups[0]["lr"]
        if not self.defers and (self.clips or self.logged):
            metrics["train/grad_norm"] = self.grad_norm.item()
        if self.scaler.is_enabled():
            metrics["train/loss_scale"] = self.scaler.get_scale()
        return metrics

    @during(Phase.VALIDATION)
    def validate(self) -> bool:
        """Validate once, unless a signal ends it. Return whether `checkpoint.keep_best` wants a checkpoint of it."""
        self.emit("on_flush")
        self.validated_at = time.monotonic()
        if self.plan.validation is None or self.stop_reason == "signal":  # which the deferred work has heard
            return False
        if (metrics := self.evaluator.evaluate(self.eval_model)) is None:
            self.stop_reason = "signal"  # also where the run would have ended here
            return False
        self.validation, self.validated_step = metrics, self.step
        self.seconds = time.monotonic() - self.started
        self.emit("on_validation_end", self.validation)
        self.emit("on_media", self.evaluator.media)
        return training_state.note_best(self)

    def _try_recipe(self) -> None:
        """Try `summary` and `metrics` before the first step."""
        check_rates(self.recipe)
        try_summary(self.recipe, self.rank, self.ranks.each)
        if self.plan.validation is not None:
            self.evaluator.try_out(self.plan.watched, self.eval_model)

    @property
    def best(self) -> dict[str, Any]:
        """The best validation: its metric, value and step."""
        return training_state.best(self)

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, or the one that it goes on from."""
        return self.saver.newest or self.plan.resumed

    def stop(self, reason: str) -> None:
        """End after this step. Call it on all ranks or on none: it is not a collective."""
        self.stop_reason = self.stop_reason or reason

    def _finish(self) -> None:
        if not self.logged:  # a callback or a signal has ended the run at this step
            self.last_metrics = self.last_metrics | self._measure()
        if self.train_loss.lost and self.stop_reason != "signal":
            self.stop_reason = NOT_FINITE
        with ExitStack() as every:  # last first, also if one of them raises
            every.callback(report, self)
            every.callback(training_state.save, self, last=True)
            if self.stop_reason != "signal" and self.validated_step != self.step:
                try:
                    self.validate()
                except Exception:
                    if self.evaluator.apart:  # a save would wait for ranks that are elsewhere
                        every.pop_all()
                    raise

    def _wrap(self, hook: str, thing: Any) -> Any:
        for wrap in self.hooks[hook]:
            thing = self._make(hook, wrap, thing)
        return thing

    def _make(self, hook: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call a hook that makes or wraps an object."""
        made = call(self, *args)
        refuse_other_value(owner(call, self.callbacks), hook, made)
        return made

    def emit(self, hook: str, *args: Any) -> None:
        if calls := self.hooks[hook]:
            self._call(calls, args)

    @during(Phase.CALLBACKS)
    def _end_logged_step(self) -> None:
        for call in self.hooks["on_step_end"]:
            call(self)
            numbers_only(call, self.metrics, self.callbacks)

    @during(Phase.CHECKPOINT)
    def _check_callbacks(self) -> None:
        """Refuse attributes that callbacks have set, and after the first step what no checkpoint can have."""
        names = vars(self).keys()
        if not self.attributes and isinstance(self.optimizer, Optimizer):
            refuse_state_elsewhere(self.optimizer)
        refuse_new_attributes(names - self.own - vars(Trainer).keys() - BY_FIT, names, self.callbacks)
        for (name, callback), hook in product(self.callbacks.items(), () if self.attributes else SAVED):
            if not type(callback).__module__.startswith("trainer."):
                saved(name, callback, hook)
        self.attributes = 1
        self.attributes = len(names)

    @during(Phase.CALLBACKS)
    def _call(self, calls: list[Callable[..., Any]], args: tuple[Any, ...]) -> None:
        for call in calls:
            call(self, *args)
