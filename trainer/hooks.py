"""The hooks of a run's active callbacks."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.callback import HOOKS, UNLOGGED, Callback, overrides
from trainer.checks.callback import owner, refuse_other_value
from trainer.comm.phases import Phase, during
from trainer.context import Context
from trainer.log import log


class Hooks(dict[str, list[Callable[..., Any]]]):
    """Hook name -> the callbacks' methods of that name, in the callbacks' order. A list may be replaced.

    Callbacks that only communicate are inactive on one rank.

    Attributes:
        callbacks: All callbacks of the run.
        defers: Whether an active callback defers the optimizer's step.
    """

    def __init__(self, callbacks: Mapping[str, Callback], world: int) -> None:
        self.callbacks = callbacks
        idle = [name for name, callback in callbacks.items() if callback.communicates and world == 1]
        if idle:
            log.info("one rank, nothing to communicate: %s will do nothing", ", ".join(idle))
        active = [callback for name, callback in callbacks.items() if name not in idle]
        super().__init__({hook: [getattr(c, hook) for c in active if overrides(c, hook)] for hook in HOOKS})
        self[UNLOGGED] = [call for call in self["on_step_end"] if not hasattr(call, "only_logged")]
        self.defers = any("defers" in callback.provides for callback in active)

    def make(self, hook: str, call: Callable[..., Any], trainer: Context, *args: Any) -> Any:
        """Call a hook that makes or wraps an object, and check its result.

        Raises:
            ConfigError: It returned None or an object of the wrong kind.
        """
        made = call(trainer, *args)
        refuse_other_value(owner(call, self.callbacks), hook, made)
        return made

    def wrap(self, hook: str, trainer: Context, thing: Any) -> Any:
        """Wrap the thing with this hook of each callback; the first callback's wrap is the innermost."""
        for call in self[hook]:
            thing = self.make(hook, call, trainer, thing)
        return thing

    def emit(self, hook: str, trainer: Context, *args: Any) -> None:
        """Call this event hook of all active callbacks."""
        if calls := self[hook]:
            self._call(calls, trainer, *args)

    @during(Phase.CALLBACKS)
    def _call(self, calls: list[Callable[..., Any]], *args: Any) -> None:
        for call in calls:
            call(*args)
