"""The training loop: everything that every run needs. Callbacks have the rest."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from operator import attrgetter, is_not
from typing import Any

from torch.optim import Optimizer

from trainer.agreement import StepAgreement
from trainer.callback import UNLOGGED, Role
from trainer.checkpoint.pretrained import load_weights
from trainer.checks.callback import SAVED, numbers_only, refuse_attributes, refuse_endless, saved
from trainer.comm.phases import Phase, during, marker, running
from trainer.context import FIXED, KNOWN, Context
from trainer.data.batch import Micro, Split, Step
from trainer.data.iterable import warn_of_same_batches
from trainer.errors import NOT_FINITE, ConfigError
from trainer.files import remove_unused
from trainer.log import stop_log
from trainer.optim.made import refuse_state_elsewhere
from trainer.optim.rates import RATE
from trainer.parallel.attributes import copied, note_changes, owners, tensors_kept
from trainer.parallel.frozen import TRAINS, changed, follow, refuse_fixed, refuse_in_pass, refuse_unheld
from trainer.parallel.strategy import clip_values
from trainer.parallel.torch_calls import stepper
from trainer.parallel.warmup import buffers_kept
from trainer.process.crash import read_summary
from trainer.process.signals import StopSignals
from trainer.rng import GOLDEN, MASK, STEP, generators_of, mix
from trainer.setup import Components
from trainer.summary import report, report_error
from trainer.timeouts import STILL

MADE = attrgetter(*FIXED)


class Loop:
    """Runs the steps, validates, and requests checkpoints.

    Args:
        context: The part of the run that callbacks see.
        parts: The part that they do not see.
    """

    attributes = 0  # the number of the context's attributes when callbacks were last checked

    def __init__(self, context: Context, parts: Components) -> None:
        self.context, self.parts, self.plan, self.checkpointer = context, parts, parts.plan, parts.checkpointer
        self.state, self.hooks, self.options = context.state, context.hooks, context.options
        self.strategy, self.optimizer, self.world = context.strategy, context.optimizer, context.world
        self.rates, self.passes, self.forward_backward = parts.rates, parts.passes, parts.forward_backward
        self.agreement = StepAgreement(context.ranks, context.state, parts.plan, context.strategy.data_world)
        context.agreement, context.validate = self.agreement, self.validate
        self.clips = self.options.clip_norm is not None or self.options.clip_value is not None
        self.followed, self.trains = parts.followed, parts.trained
        self.generators = generators_of(context.device)
        self.seed_base = mix(self.options.seed, STEP, self.strategy.data_rank)
        self.made, self.known = MADE(context), KNOWN | vars(context).keys()  # set-up hooks may have set some
        self.logged = True  # this step's numbers are measured
        self.compose()

    def fit(self) -> dict[str, Any]:
        """Train to the end, or until stopped; return the content of summary.json on every rank."""
        refuse_endless(self.plan.max_steps, self.context.callbacks)
        context, ranks = self.context, self.context.ranks
        context.fitted = True
        with StopSignals() as context.signals, ExitStack() as every:  # in reverse order, even if one of them raises
            note = partial(ranks.note_failure, RuntimeError, context.run_dir / "logs")
            context.signals.on_inspect, self.agreement.signals = note, context.signals
            if self.world > 1:
                no_log = context.heartbeat.file or context.ended
                stacks = None if no_log else (context.run_dir / "logs" / f"rank{context.rank}.log").open("a")
                context.heartbeat.watch(STILL * self.options.timeout_s, note, stacks)
            every.callback(remove_unused)
            quarantine = self.parts.quarantine.file
            for end in (context.heartbeat.close, context.saver.close, context.loader.close, quarantine.close):
                every.callback(end)
            every.enter_context(context.undo)
            for end in reversed(self.hooks["on_fit_end"]):
                every.callback(end, context)
            every.push(partial(report_error, context))  # runs first: the rest may wait for a hung device
            if context.ended:
                self.checkpointer.load_ended()
            else:
                self._start()
                self._run_steps()
                self._finish()
            if context.stop_reason == NOT_FINITE:
                raise context.train_loss.refusal(self.state.step, ranks.first(str(context.checkpoint or "")))
        with StopSignals():  # a launcher may signal all ranks as soon as the first one ends
            context.summary = ranks.first(context.summary or read_summary(context.run_dir / "summary.json"))
            self.close()
        context.closed = True
        return context.summary

    def close(self) -> None:
        """End the process groups. The weights stay in `module`."""
        # Drop DDP first: a reducer that holds the last reference to a group waits, while it holds the GIL, for a thread
        # that may itself wait for the GIL.
        self.strategy.unwrap()
        self.context.ranks.leave()
        stop_log()

    def _start(self) -> None:
        context, plan, state = self.context, self.plan, self.state
        self.stream = self._open_stream()
        if plan.resumed:
            self.checkpointer.load(plan.resumed)
            self.stream = note_changes(self.stream, context.recipe, context.module)
        elif self.options.init_from:
            load_weights(context.module, self.options.init_from)
        state.start_clocks()
        self.validates_next = plan.next_validation(state.step)
        if plan.max_steps is not None and state.step >= plan.max_steps:
            context.stop("max_steps")
        context.heartbeat.beat(state.step)
        self.checkpointer.refuse_superseded()
        before = context.loader.copies()
        context.emit("on_fit_start")
        before.refuse_before(state.step)
        if not (context.stop_reason and self.checkpointer.is_saved()):  # else nothing is left to do
            context.accepted = True
            self._accept()
        self.compose()

    def _accept(self) -> None:
        """Start writing into the run's folder, now that all checks have passed."""
        context, plan, state = self.context, self.plan, self.state
        if context.rank == 0:
            context.command.save_config(context.run_dir)
        self.checkpointer.leave_newer()
        if plan.resumed:
            self.rates.put(state.step + plan.ahead)  # a validation may change them before the first step
        if context.rank == 0:
            self.parts.quarantine.begin()
        due = plan.resumed and state.step and plan.validates_at(state.step) and not context.stop_reason
        if due and state.validated_step != state.step and self.validate():  # a signal cut the checkpoint's short
            self.checkpointer.save()

    def _open_stream(self) -> Iterator[Step]:
        """Open the data at the checkpoint's position, and rehearse the passes on its first micro-batch."""
        context, plan = self.context, self.plan
        stop = math.inf if plan.max_steps is None else plan.samples_at(plan.max_steps)
        split_at = partial(self._split, self.hooks["split"][0]) if self.hooks["split"] else None
        stream = context.loader.train(plan.manifest.get("samples", 0), split_at, stop)
        copies = context.loader.copies()
        first = next(stream)  # refuses unusable data before anything changes
        if self.world > 1 and plan.order is None:
            warn_of_same_batches(first.peek(), self.strategy.data_rank, context.ranks.gather)
        if self.world > 1 or self.hooks["rehearse"]:
            self._rehearse(Micro(first.peek(), first.weights[0], [], []))
        context.buckets = self.strategy.buckets()
        stream = self.hooks.wrap("wrap_batches", context, chain(iter([first]), stream))
        if plan.data.workers and copies.kept:
            stream = map(copies.unchanged, stream)
        return map(self._laid_out, stream) if self.world > 1 else stream

    def _split(self, hook: Callable[..., Split], position: int) -> Split:
        split = self.hooks.make("split", hook, self.context, position)
        if (split.samples, split.world) != (self.context.batch, self.strategy.data_world):
            wanted = f"batch={self.context.batch} over {self.strategy.data_world} rank(s)"
            raise ConfigError(f"split: returned {split}; split {wanted}")
        return split

    def _rehearse(self, first: Micro) -> None:
        """Run a few passes on the `first` micro-batch and discard their gradients, so that DDP's buckets become final.

        The buckets determine the order of summation, and thus the last bits, which a resumed run has to reproduce.
        """
        context = self.context

        def run_pass(batch: Any) -> None:
            if running.clock is not self.clock:  # started by a callback that measures
                self.compose()
            weight = first.weight if batch is first.batch else context.loss.weight(batch)
            data = Step([Micro(copied(batch), weight, [], [])])  # because `loss` may pop a member
            with tensors_kept(owners(context.recipe, context.module).values()):
                self.forward_backward(data, lambda: weight * self.strategy.data_world)
            self.optimizer.zero_grad(set_to_none=True)

        context.rehearsing = True
        with buffers_kept(context.module):
            self.strategy.warm_up(partial(run_pass, first.batch))
            for rehearse in self.hooks["rehearse"]:
                rehearse(context, run_pass, first.batch)
        context.rehearsing = False

    def _run_steps(self) -> None:
        context, plan = self.context, self.plan
        while not context.stop_reason:
            if self.mark:
                self.mark(Phase.DATA)
            data = next(self.stream)
            if running.clock is not self.clock:  # started or stopped by a profiler
                self.compose()
            if self.mark:
                self.mark(Phase.CALLBACKS)
            done = self.state.step + 1
            self.logged = done % self.options.log_every_steps == 0 or done == plan.max_steps
            self._train_step(data)
            self._after_step()
            if self.state.step == context.heartbeat.began + 2:  # by now overlap has created its state
                self.checkpointer.reserve()

    def compose(self) -> None:
        """Assemble the calls of a step, leaving out everything that this run does not use."""
        self.clock, self.mark, scaler = running.clock, marker(), self.context.scaler
        self.passes.mark = self.mark
        self.before_update: list[Callable[[], Any]] = [partial(self.mark, Phase.OPTIMIZER)] if self.mark else []
        self.update: Callable[[], Any] = stepper(self.optimizer)
        if scaler.is_enabled():
            self.before_update.append(partial(scaler.unscale_, self.optimizer))
            self.update = self._scaled_update
        if self.hooks["on_before_optimizer_step"]:
            self.before_update.append(partial(self.hooks.emit, "on_before_optimizer_step", self.context))

    def _scaled_update(self) -> None:
        self.context.scaler.step(self.optimizer)
        self.context.scaler.update()

    def _train_step(self, data: Step) -> None:
        for generator in self.generators:
            generator.manual_seed((self.seed_base + self.state.step * GOLDEN) & (MASK >> 1))
        if not self.rates.settled or list(map(RATE, self.optimizer.param_groups)) != self.rates.given:
            self.rates.put(self.state.step + self.plan.ahead)
        # The agreement starts one int64 all-reduce, which overlaps with the first forward pass.
        self.context.data, self.context.losses = data, self.forward_backward(data, self.agreement.begin(data))
        for call in self.before_update:
            call()
        if list(map(TRAINS, self.followed)) != self.trains:
            self._follow_frozen()
        if self.clips or self.logged:
            self._clip()
        self.update()
        for p in self.context.parameters:
            p.grad = None  # like zero_grad, at a tenth of its cost
        self.state.step, self.state.samples = self.state.step + 1, self.state.samples + self.context.batch

    def _laid_out(self, data: Step) -> Step:
        """Return the next step's data, after laying out its trainable parameters over the ranks."""
        if list(map(TRAINS, self.followed)) != self.trains:
            self._follow_frozen(data)
        return data

    def _follow_frozen(self, data: Step | None = None) -> None:
        """Adapt to parameters that user code has frozen or unfrozen.

        Args:
            data: The data of the step about to start; None if the change came inside its passes.
        """
        context, step = self.context, self.state.step + 1
        what = changed(context.module, self.followed, self.trains)
        measures = (Role.MEASURE, Role.OBSERVE)
        refuse_fixed(what, step, {n: c for n, c in context.callbacks.items() if c.role not in measures}, self.hooks)
        refuse_unheld(what, step, context.module, self.optimizer)
        if data is None:
            refuse_in_pass(what, step, self.world)
        rehearse = data and partial(self._rehearse, Micro(data.peek(), data.weights[0], [], []))
        follow(self.strategy, context.module, rehearse)
        self.trains = list(map(TRAINS, self.followed))
        context.buckets = self.strategy.buckets()

    def _clip(self) -> None:
        """Clip the gradients by norm or by value. `grad_norm` becomes the norm before clipping."""
        if self.options.clip_norm is not None or self.logged:
            self.context.grad_norm = self.strategy.clip(self.options.clip_norm)
        if self.options.clip_value is not None:
            clip_values(self.context.parameters, self.options.clip_value)

    def _after_step(self) -> None:
        context, state, plan, agreed = self.context, self.state, self.plan, self.agreement
        if self.mark:
            self.mark(Phase.CALLBACKS)
        if agreed.sums is not None:  # a callback's own passes did not wait for them
            agreed.wait()
        if self.logged:
            context.metrics = self._measure()
            self._end_logged_step()
            context.last_metrics = context.metrics
        else:
            context.metrics = {}
            for call in self.hooks[UNLOGGED]:
                call(context)
        if len(vars(context)) != self.attributes or any(map(is_not, MADE(context), self.made)):
            self._check_callbacks()
        if agreed.bad:
            assert plan.epoch_samples
            epoch = (state.samples - 1) // plan.epoch_samples
            self.parts.quarantine.take(state.step, epoch, context.data.bad, self.strategy.data_rank)
        stop, save, validate = agreed.requests
        if stop or (self.world == 1 and context.signals.name):
            context.stop("signal")
        if state.step == plan.max_steps:
            context.stop("max_steps")
        validate |= state.step == self.validates_next
        save |= state.step % plan.save_steps == 0
        if validate and context.stop_reason != "signal":  # otherwise the resumed run validates
            save |= self.validate()
        if save and not context.stop_reason:  # `_finish` saves the last step
            self.checkpointer.save()
        context.saver.check(ends=bool(context.stop_reason))
        if context.heartbeat.watched:
            context.heartbeat.beat(state.step)

    def _measure(self) -> dict[str, float]:
        """Measure this step's metrics. Waits for the device; a collective."""
        context = self.context
        self.state.count_seconds()
        losses = context.train_loss
        metrics = losses.measure(context.losses, context.data.weights, self.state.step, context.gathered)
        if losses.ends or (losses.since is not None and not self.checkpointer.is_finite()):
            context.stop(NOT_FINITE)
        metrics["train/lr"] = self.optimizer.param_groups[0]["lr"]
        if not self.hooks.defers and (self.clips or self.logged):
            metrics["train/grad_norm"] = context.grad_norm.item()
        if context.scaler.is_enabled():
            metrics["train/loss_scale"] = context.scaler.get_scale()
        return metrics

    @during(Phase.VALIDATION)
    def validate(self) -> bool:
        """Validate once, unless a signal interrupts it; return whether `checkpoint.keep_best` wants a checkpoint."""
        context, state, kept = self.context, self.state, self.options.checkpoint.keep_best
        context.emit("on_flush")
        state.validated_at, self.validates_next = time.monotonic(), self.plan.next_validation(state.step)
        if self.plan.validation is None or context.stop_reason == "signal":  # received during the deferred work
            return False
        if (metrics := self.parts.evaluator.evaluate(context.eval_model)) is None:
            context.stop_reason = "signal"  # even if the run would have ended here anyway
            return False
        state.validation, state.validated_step = metrics, state.step
        state.count_seconds()
        context.emit("on_validation_end", metrics)
        context.emit("on_media", self.parts.evaluator.media)
        before = context.ranks.first(state.best)  # only rank 0 knows which checkpoints were written
        metric = kept or next((name for name in state.validation if name == "val/loss"), None)
        return metric is not None and state.note_best(metric, before) and kept is not None

    def _finish(self) -> None:
        context, state = self.context, self.state
        if not self.logged:  # a callback or a signal ended the run at this step
            context.last_metrics = context.last_metrics | self._measure()
        if context.train_loss.lost and context.stop_reason != "signal":
            context.stop_reason = NOT_FINITE
        with ExitStack() as every:  # in reverse order, even if one of them raises
            every.callback(report, context)
            every.callback(self.checkpointer.save, last=True)
            if context.stop_reason != "signal" and state.validated_step != state.step:
                try:
                    self.validate()
                except Exception:
                    if self.parts.evaluator.apart:  # a save would wait for ranks in another collective
                        every.pop_all()
                    raise

    @during(Phase.CALLBACKS)
    def _end_logged_step(self) -> None:
        context = self.context
        for call in self.hooks["on_step_end"]:
            call(context)
            numbers_only(call, context.metrics, context.callbacks)

    @during(Phase.CHECKPOINT)
    def _check_callbacks(self) -> None:
        """Refuse attributes that callbacks set in vain and, after the first step, state that can't be saved."""
        context, names = self.context, vars(self.context).keys()
        if not self.attributes and isinstance(self.optimizer, Optimizer):
            refuse_state_elsewhere(self.optimizer)
        replaced = [name for name, made in zip(FIXED, self.made, strict=True) if getattr(context, name) is not made]
        refuse_attributes(names - self.known, replaced, self.known, context.callbacks)
        for (name, callback), hook in product(context.callbacks.items(), () if self.attributes else SAVED):
            if not type(callback).__module__.startswith("trainer."):
                saved(name, callback, hook)
        self.attributes = len(names)
