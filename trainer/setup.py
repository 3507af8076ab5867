"""Builds the parts of a run, in the order of docs/step.md."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from trainer.callback import UNLOGGED, Role
from trainer.checkpointing import Checkpointer, claim, make_saver
from trainer.checks.recipe import (
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
from trainer.comm.affinity import bind_to_cores
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.context import Context, RunArguments
from trainer.data.bad_samples import BadSamples, allowed
from trainer.data.batch import Split, count_samples
from trainer.data.loader import Loader
from trainer.files import remove_unused
from trainer.hooks import Hooks
from trainer.inference import live
from trainer.log import log, log_to_terminal
from trainer.metrics import replica_check
from trainer.metrics.named_losses import NamedLosses, combined
from trainer.metrics.train_loss import TrainLoss
from trainer.optim.group_settings import GroupSettings
from trainer.optim.groups import Groups, ParameterRules, make_optimizer
from trainer.optim.rates import Rates
from trainer.optim.schedule import Constant
from trainer.parallel import sparse
from trainer.parallel.batch_norm import across_ranks
from trainer.parallel.ddp import DDP
from trainer.parallel.forward_backward import Accumulate, ForwardBackward
from trainer.parallel.frozen import TRAINS, followed
from trainer.parallel.state_fits import refuse_too_large
from trainer.parallel.strategy import SingleDevice, Strategy, to_device, trained
from trainer.parallel.torch_calls import defer_dynamo
from trainer.plan import Plan
from trainer.precision import Precision
from trainer.process.heartbeat import Heartbeat
from trainer.run_dir import make_run_dir, nothing_left, start_log
from trainer.summary import report_error
from trainer.validation import Evaluator

MakeOptimizer = Callable[[Groups], Optimizer]


@dataclass(frozen=True)
class Components:
    """The parts of a run that callbacks do not see."""

    plan: Plan
    checkpointer: Checkpointer
    quarantine: BadSamples
    rates: Rates
    passes: Accumulate
    forward_backward: ForwardBackward  # `passes`, wrapped by callbacks
    evaluator: Evaluator
    followed: list[nn.Parameter]  # parameters checked at each step, because user code may freeze or unfreeze them
    trained: list[bool]  # for each, whether it trained when the optimizer was made


def open_run(given: RunArguments, refused: ExitStack) -> tuple[Context, Plan]:
    """Connect the ranks, plan the run, and create and claim its folder.

    Args:
        refused: Undoes all of this if the run is refused before it trains.
    """
    options = given.options
    ranks = Ranks(given.place, options.accelerator, options.backend, options.timeout_s)
    log_to_terminal(ranks.rank)
    refused.callback(ranks.close)  # so that peers waiting for this rank get an error
    precision = Precision(options.precision, ranks.device, options.deterministic, ranks.each, options.master_weights)
    plan = Plan(
        given.recipe, given.callbacks, given.schedule or Constant(), settings=given.command.settings, batch=given.batch,
        micro_batch=given.micro_batch, accumulate=given.accumulate, data=given.data, place=given.place, each=ranks.each,
        options=options.with_precision(precision.label), spec=given.command.spec,
    )  # fmt: skip
    trainer = Context(given, plan, ranks)
    trainer.precision, trainer.scaler, trainer.callbacks = precision, precision.scaler, plan.callbacks
    refused.callback(remove_unused)
    _open_folder(trainer, plan, refused)
    refused.push(partial(report_error, trainer))
    refused.callback(trainer.saver.close)
    refused.enter_context(trainer.undo)
    bind_to_cores(ranks, options.affinity)  # before data workers fork
    trainer.evaluate, trainer.predict = partial(live.evaluate, trainer), partial(live.predict, trainer)
    trainer.hooks = Hooks(plan.callbacks, ranks.world)
    if ranks.world > 1 and options.check_replicas_every:
        for hook in ("on_step_end", UNLOGGED):
            trainer.hooks[hook].append(replica_check.check)
    return trainer, plan


def _open_folder(trainer: Context, plan: Plan, refused: ExitStack) -> None:
    """Create the run's folder and claim it, start the log in it, and make the objects that write there."""
    run_dir = None if trainer.rank else make_run_dir(plan, trainer.name)
    folder, trainer.ended = trainer.ranks.first(run_dir and [str(run_dir), nothing_left(plan, run_dir)])
    trainer.run_dir = Path(folder)
    claimed = claim(trainer)  # before the log, because another process may be writing this run
    if claimed:
        refused.callback(claimed.close)
    if not trainer.ended:
        start_log(trainer.run_dir, trainer.rank)
    trainer.heartbeat = Heartbeat(os.environ.get("ECHELON_HEARTBEAT", ""))
    trainer.saver = make_saver(trainer, claimed)
    guarded = any(callback.role is Role.GUARD for callback in plan.callbacks.values())
    trainer.train_loss = TrainLoss(trainer.ranks, guarded)
    if plan.epoch_samples and trainer.batch > plan.epoch_samples:
        log.warning(
            "batch=%d: recipe.data('train') has %d samples, so a step takes each sample %.4g times",
            trainer.batch, plan.epoch_samples, trainer.batch / plan.epoch_samples,
        )  # fmt: skip


def build(trainer: Context, plan: Plan, optimizer: MakeOptimizer) -> Components:
    """Build the model, the Reduce chain, the strategy, the optimizer, the passes, the loader and the evaluator.

    Raises:
        ConfigError, DataError: A part can't work, or is incompatible with another one.
    """
    options, hooks, checkpointer = trainer.options, trainer.hooks, Checkpointer(trainer, plan)
    limit = allowed(plan.data.max_bad, plan.epoch_samples or 0)
    quarantine = BadSamples(trainer.run_dir / "quarantine.jsonl", limit, trainer.ranks.gather, trainer.rank)
    torch.manual_seed(options.seed)
    defer_dynamo()
    trainer.ddp = options.ddp.arguments(trainer.device.type == "cuda")
    trainer.new_optimizer = partial(make_optimizer, optimizer)
    checkpointer.rules = build_module(trainer, optimizer)
    trainer.loss = _checked_loss(trainer)
    _distribute(trainer)
    made = make_optimizer(optimizer, trainer.module, checkpointer.rules)
    _refuse_sparse(trainer, made)
    made = trainer.precision.wrap_optimizer(made, trainer.module, options.seed, lambda: trainer.step)
    trainer.optimizer = hooks.wrap("wrap_optimizer", trainer, made)
    watched = followed(trainer.module, trainer.world)
    trains = list(map(TRAINS, watched))
    _refuse_too_large(trainer)
    rates = checkpointer.rates = Rates(plan.rate, trainer.optimizer, resumed=bool(plan.resumed))
    settings = GroupSettings(trainer.optimizer)
    checkpointer.parts.update(scaler=trainer.scaler, quarantine=quarantine, rates=rates, group_settings=settings)
    passes = Accumulate(trainer.loss, trainer.strategy, trainer.scaler)
    forward_backward = hooks.wrap("wrap_forward_backward", trainer, passes)
    evaluator = _open_data(trainer, plan)
    if plan.resumed:
        checkpointer.refuse_other_model(plan.resumed)
    check_rates(trainer.recipe)
    try_summary(trainer.recipe, trainer.rank, trainer.ranks.each)
    if plan.validation is not None:
        evaluator.try_out(plan.watched, trainer.eval_model)
    return Components(plan, checkpointer, quarantine, rates, passes, forward_backward, evaluator, watched, trains)


def build_module(trainer: Context, optimizer: MakeOptimizer) -> ParameterRules:
    """Build the module on its device; return its per-parameter settings."""
    hooks, found = trainer.hooks, list[ParameterRules]()

    def recipes_model() -> nn.Module:
        """Return the recipe's model, grouped and frozen before callbacks split it or register gradient hooks."""
        model = build_model(trainer.recipe)
        refuse_no_tensors(model)
        found.append(ParameterRules(optimizer, trainer.recipe, model))
        return model

    make: Callable[[], nn.Module] = recipes_model
    for hook in hooks["build_model"]:
        make = partial(hooks.make, "build_model", hook, trainer, make)
    module = to_device(make(), trainer.device)
    if trainer.options.sync_batch_norm:
        module = across_ranks(module, trainer.world, trainer.device)
    if not module.training:  # as after `from_pretrained`; a part that the recipe has set to eval stays in eval
        module.train()
    trainer.module = hooks.wrap("wrap_model", trainer, trainer.precision.convert(module))
    trainer.eval_model = trainer.global_model = trainer.module
    refuse_untrained(trainer.module)
    trainer.parameters = trained(trainer.module)
    return found[-1]


def _checked_loss(trainer: Context) -> CheckedLoss:
    if trainer.options.clip_value is not None:
        refuse_complex(trainer.module, "trainer.clip_value", "clips real numbers")
    if trainer.scaler.is_enabled():
        refuse_complex(trainer.module, "trainer.precision=fp16", "scales real gradients")
    named = NamedLosses(trainer.recipe, lambda: None if trainer.rehearsing else trainer.step)
    trainer.gathered.append((lambda: named.sums(trainer.data.weights), combined))
    elsewhere = parameters_elsewhere(trainer.recipe, trainer.module)
    weight = weight_of(trainer.recipe) or count_samples
    return CheckedLoss(trainer.precision.cast(named), weight, trainer.hooks.defers, elsewhere)


def _distribute(trainer: Context) -> None:
    """Lay the model out over the ranks, with the callback that has `distribute`, else with DDP."""
    hooks, module, world = trainer.hooks, trainer.module, trainer.world
    if world > 1 and (hooks["wrap_reduce"] or sparse.sparse_weights(module)):  # else DDP reduces in C++
        trainer.reduce = hooks.wrap("wrap_reduce", trainer, AllReduce(trainer.ranks.new_group()))
    if hooks["distribute"]:
        strategy: Strategy = hooks.make("distribute", hooks["distribute"][0], trainer, module)
    elif world == 1:
        strategy = SingleDevice(module)
    else:
        step = lambda: trainer.step  # noqa: E731
        strategy = DDP(module, trainer.rank, world, trainer.device, trainer.ddp, trainer.reduce, step)
    trainer.strategy, trainer.parameters = strategy, strategy.parameters


def _refuse_sparse(trainer: Context, optimizer: Optimizer) -> None:
    """Refuse an embedding's sparse gradients if a callback or a setting needs dense ones."""
    measures = (Role.MEASURE, Role.OBSERVE)
    callbacks, ranks = trainer.callbacks, trainer.ranks
    hooks = {name: sparse.HOOKS[:1] if c.role in measures else sparse.HOOKS for name, c in callbacks.items()}
    dense = [n for n, own in hooks.items() if any(getattr(callbacks[n], h) in trainer.hooks[h] for h in own)]
    nccl = ranks.world > 1 and ranks.backend == "nccl"
    sparse.refuse_sparse(trainer.module, optimizer, dense, trainer.precision.label, nccl)


def _refuse_too_large(trainer: Context) -> None:
    """Refuse a training state that does not fit, while only the weights are allocated."""
    roles = {role for callback in trainer.callbacks.values() for role in (callback.role, *callback.also)}
    refuse_too_large(
        trainer.strategy, trainer.module, trainer.new_optimizer, trainer.ranks,
        averaged=Role.AVERAGE in roles, in_backward=Role.OPTIMIZER in roles,
    )  # fmt: skip


def _open_data(trainer: Context, plan: Plan) -> Evaluator:
    """Open the data; return the evaluator of the validation data."""
    strategy, options, ranks = trainer.strategy, trainer.options, trainer.ranks
    trainer.loader = Loader(
        plan.source, plan.order, Split(trainer.batch, strategy.data_world, plan.accumulate), plan.data,
        validation=plan.validation, rank=strategy.data_rank, seed=options.seed, timeout_s=options.timeout_s,
        device=trainer.device, ranks_on_node=ranks.place.local_world,
        collate=getattr(trainer.recipe, "collate", default_collate), weight=weight_of(trainer.recipe),
    )  # fmt: skip
    return Evaluator(
        trainer.recipe, "val", trainer.loader.validations(), ranks, trainer.precision,
        samples=plan.validation.size if plan.validation else 0, max_bad=plan.data.max_bad, replicas=strategy.replicas,
        lockstep=strategy.lockstep, data_rank=strategy.data_rank,
        stopping=lambda: trainer.fitted and trainer.signals.name, beat=trainer.heartbeat.beat,
    )  # fmt: skip
