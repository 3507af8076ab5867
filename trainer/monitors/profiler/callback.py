"""Records some steps of a run with torch.profiler: a trace for each rank, with phases and callbacks by name."""

from collections.abc import Iterator

from trainer.annotated import NonNegativeInt, PositiveInt
from trainer.callback import Callback
from trainer.comm.phases import Phase, during
from trainer.context import Context
from trainer.data.batch import Step
from trainer.errors import ConfigError, printable
from trainer.log import log
from trainer.monitors.profiler.recording import Recording

KEY = "callbacks.profiler"


class Profiler(Callback):
    """Writes `profile/rank<R>/step-<N>.json.gz` for the steps from N on, to view in Perfetto or chrome://tracing.

    The trace has regions for the step's phases, as step_timer names them, and for each callback's hooks. A validation
    ends a recording, since a validation may be long. If the recording or the disk fails, a warning is logged and the
    run continues.

    Args:
        first: The first recorded step, counted from 1 in the whole run.
        active: Steps per recording.
        every: Steps from the beginning of one recording to that of the next; null: one recording.
        ranks: The ranks that record; null: all.
        record_shapes: Record the shapes of operators' inputs.
        with_stack: Record the lines of Python that call operators.
        profile_memory: Record allocations: on a GPU as torch's snapshot, on a CPU in the trace. On a CPU the trace then
            lacks threads other than the main one.
    """

    def __init__(
        self,
        first: PositiveInt = 10,
        active: PositiveInt = 3,
        every: int | None = None,
        ranks: list[NonNegativeInt] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
    ) -> None:
        if every is not None and every < active:
            why = f"is less than active={active}, so recordings would overlap"
            raise ConfigError(f"{KEY}.every={every}: {why}; raise it")
        if ranks is not None and not ranks:
            raise ConfigError(f"{KEY}.ranks=[]: no rank would record; name some, or null for all")
        self.first, self.active, self.every, self.ranks = first, active, every, ranks
        self.asked = {"record_shapes": record_shapes, "with_stack": with_stack, "profile_memory": profile_memory}
        self.recording: Recording | None = None

    def wrap_batches(self, trainer, steps: Iterator[Step]) -> Iterator[Step]:
        if self.ranks is not None and trainer.rank not in self.ranks:
            return steps
        return self._follow(trainer, steps)

    def on_fit_start(self, trainer) -> None:
        last, begins = trainer.plan.max_steps, self._next(trainer.step + 1)
        if begins is None or (last is not None and begins > last):
            text = "profiler: no step is recorded, since the run goes from step %d to %s; give another %s.first"
            log.info(text, trainer.step + 1, last, KEY)
        if absent := [rank for rank in self.ranks or () if rank >= trainer.world]:
            text = "profiler: no trace of rank %s, since the run has ranks 0 to %d; give another %s.ranks"
            log.warning(text, ", ".join(map(str, absent)), trainer.world - 1, KEY)

    def on_fit_end(self, trainer) -> None:
        self._end()

    def _next(self, step: int) -> int | None:
        """Return the first step of the next recording that begins at `step` or later."""
        if step <= self.first:
            return self.first
        return None if self.every is None else step + (self.first - step) % self.every

    def _follow(self, trainer: Context, steps: Iterator[Step]) -> Iterator[Step]:
        while True:
            step = trainer.step + 1
            if self.recording and step >= self.recording.first + self.active:
                self._end()
            begins = self._next(step) == step and not self.recording
            if begins and (begun := self._begin(trainer, step)):
                begun.regions.begin()  # the clock marks everything that follows
            fetched = next(steps, None)
            if fetched is None:
                return
            yield fetched
            del fetched  # this frame would keep it while the next one is fetched

    @during(Phase.CALLBACKS)  # between steps the clock counts what follows as the wait for data
    def _begin(self, trainer: Context, step: int) -> Recording | None:
        recording = Recording(trainer, step, self.active, **self.asked)
        try:
            recording.start(self._end)
        except Exception as error:
            recording.undo.close()
            log.warning("profiler: step %d is not recorded: %s", step, short(error))
            return None
        self.recording = recording
        return recording

    @during(Phase.CALLBACKS)
    def _end(self) -> None:
        """Stop, and write the files. Called between steps, before a validation, and at the end of the run."""
        recording, self.recording = self.recording, None
        if recording is None:
            return
        try:
            recording.stop()
            log.info("profiler: %s", recording.write())
        except Exception as error:
            log.warning("profiler: the steps from %d have no trace: %s", recording.first, short(error))


def short(error: Exception) -> str:
    return printable(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
