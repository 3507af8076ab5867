"""The places in a run at which a test can make trouble: what has no hook is wrapped, in that run's processes."""

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.checkpoint import commit
from trainer.checkpoint.manifest import STEP
from trainer.loop import Loop

Reach = Callable[[str], None]


def watch(trainer: Any, reach: Reach) -> None:
    """Calls `reach` with the name of a place whenever the run comes to it; `startup` and `after_step` are not among
    them, for a callback comes to these by itself."""
    watch_steps(trainer, reach)
    watch_commits(reach)

    def stage(*args: Any, whole: Any = commit.stage) -> Any:
        reach("stage")
        return whole(*args)

    commit.stage = stage

    def take(*state: Any, copy: Any = trainer.saver.snapshot.take) -> Any:
        files = copy(*state)
        reach("snapshot")
        return files

    trainer.saver.snapshot.take = take


def watch_steps(trainer: Any, reach: Reach) -> None:
    loop = next(found for found in gc.get_objects() if isinstance(found, Loop) and found.context is trainer)

    def each(place: str, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            reach(place)
            yield item

    def loss(*args: Any, of: Any = trainer.loss.compute) -> Any:
        value = of(*args)
        reach("after_forward")
        return value

    def passes(*args: Any, of: Any = loop.forward_backward) -> Any:
        losses = of(*args)
        reach("after_backward")
        return losses

    evaluator = loop.parts.evaluator
    validate = evaluator.batches
    loop.forward_backward = passes
    loop.stream = each("after_fetch", loop.stream)
    trainer.loss.compute = loss
    evaluator.batches = {"val": lambda: each("eval", validate["val"]())}
    trainer.optimizer.register_step_pre_hook(lambda *_: reach("before_step"))


def watch_commits(reach: Reach) -> None:
    """`mid_write` is between two halves of what one call would write, `retention` between two files of a checkpoint
    that is deleted."""

    def write(file: int, content: Any, whole: Any = os.write) -> int:
        if len(content) < 2 or not threading.current_thread().name.startswith("checkpoint"):
            return whole(file, content)
        half = whole(file, content[: len(content) // 2])
        reach("mid_write")
        return half

    def rename(old: Any, new: Any, whole: Any = os.rename) -> None:
        commits = STEP.fullmatch(Path(new).name) and Path(old).name.startswith(".tmp-")
        if commits:
            reach("before_commit")
        whole(old, new)
        if commits:
            reach("after_commit")

    def rmtree(path: Any, *args: Any, whole: Any = shutil.rmtree, **kwargs: Any) -> None:
        if Path(path).name.startswith(".trash-"):
            next(Path(path).iterdir()).unlink()
            reach("retention")
        whole(path, *args, **kwargs)

    os.write, os.rename, shutil.rmtree = write, rename, rmtree
