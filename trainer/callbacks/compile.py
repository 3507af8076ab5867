"""Compiles the blocks of the model, or the whole model, with torch.compile."""

import importlib.util
import math
import os
import shutil
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from trainer.annotated import NonNegativeInt
from trainer.callback import Callback, Role, Symptom
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError, nearest
from trainer.log import log
from trainer.parallel.blocks import find_blocks, longest_list
from trainer.parallel.forward_backward import ForwardBackward
from trainer.process.heartbeat import Heartbeat
from trainer.timeouts import COMPILE_S

KEY = "callbacks.compile"
OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # torch's environment variables
MODES = ("default", "max-autotune-no-cudagraphs")
EAGER = ("eager", "aot_eager")  # backends that run eager's kernels, with eager's random numbers
TRACED = ("inductor", "aot_eager")  # backends that keep the state of the generator for a recomputation
UNLIMITED = 1 << 30
GraphCompiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class Compile(Callback):
    """Compiles each block of the model once, for fixed shapes (Ansel et al. 2024, doi 10.1145/3620665.3640366).

    The rehearsal compiles. Any later graph of a block is a recompilation, except for its first evaluation. Until the
    rehearsal ends, collectives wait `COMPILE_S` longer than `trainer.timeout_s` for a rank that compiles.
    """

    role = Role.COMPILE
    remedies = {Symptom.KERNELS: [{}]}

    def __init__(
        self,
        blocks: list[str] | None = None,
        whole: bool = False,
        backend: str = "inductor",
        mode: str | None = None,
        fallback_random: bool = False,
        max_recompiles: NonNegativeInt = 8,
    ) -> None:
        if whole and blocks is not None:
            raise ConfigError(
                f"{KEY}.whole=true: compiles the model, so blocks=[{','.join(blocks)}] has no effect; leave one out"
            )
        if off := [name for name in OFF if os.environ.get(name) == "1"]:
            raise ConfigError(f"{KEY}: {off[0]}=1 turns torch.compile off; unset it, or leave compile out")
        if mode is not None and mode not in MODES:
            raise ConfigError(
                f"{KEY}.mode={mode}: is unknown or has CUDA graphs, which reuse the memory of gradients; give null or "
                f"{MODES[1]}"
            )
        if backend != "inductor" and (mode is not None or fallback_random):
            key = "fallback_random=true" if fallback_random else f"mode={mode}"
            raise ConfigError(f"{KEY}.{key}: backend={backend} has no such setting; use backend=inductor")
        self.blocks, self.whole, self.backend = blocks, whole, backend
        self.mode, self.fallback_random, self.max_recompiles = mode, fallback_random, max_recompiles
        self.exact = fallback_random or backend in EAGER
        self.provides = frozenset() if backend == "inductor" else frozenset({"eager_kernels"})
        refused: dict[Any, str] = {
            "sync_batch_norm": "compiled graphs were not tried with the collectives of SyncBatchNorm; set "
            "trainer.sync_batch_norm=false or leave compile out"
        }
        if backend not in TRACED:
            refused |= {
                Role.RECOMPUTE: f"backend={backend} draws other random numbers when it recomputes; use backend="
                f"{' or '.join(TRACED)}"
            }
        self.conflicts = refused
        self.counters: list[GraphCounter] = []

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        return [Variant({"fallback_random": True})]  # to draw the same random numbers as the plain run

    def cost(self) -> Cost:
        return Cost(left_out="its factor on the passes is not measured, and is taken as 1")

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        compile_graph = self._graph_compiler(trainer.device)
        # torch would run a block eagerly after its own limit. DDPOptimizer would cut graphs at buckets, and refuses
        # graphs with recomputation.
        limits = {"recompile_limit": UNLIMITED, "accumulated_recompile_limit": UNLIMITED}
        trainer.undo.enter_context(torch._dynamo.config.patch({"optimize_ddp": False, **limits}))
        self.breaks = graph_breaks()
        if self.blocks is None and not hasattr(trainer.recipe, "blocks") and not longest_list(model):
            self.whole = True
            log.info("compile: the model has no nn.ModuleList, so the whole model is compiled")
        modules = [model] if self.whole else find_blocks(trainer.recipe, model, self.blocks, f"{KEY}.blocks")
        kinds: dict[Any, GraphCounter] = {}
        limit_s = trainer.options.timeout_s if trainer.world > 1 else math.inf
        for module in modules:
            name = type(module).__name__
            counter = GraphCounter(name, compile_graph, trainer.heartbeat, self.max_recompiles, limit_s)
            counter = kinds.setdefault(signature(module), counter)
            # `compile` alone skips torch's own forwards, such as nn.Sequential's. A copy of the module gets a partial
            # with the copy's weights, whereas a closure would keep these.
            module.forward = partial(call, module.forward)
            module.compile(backend=counter, dynamic=False)
        self.counters = list(kinds.values())
        return model

    def _graph_compiler(self, device: torch.device) -> GraphCompiler:
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise ConfigError(f"{KEY}.backend={self.backend}: is not a backend; {nearest(self.backend, known)}")
        compile_graph: Any = torch._dynamo.lookup_backend(self.backend)
        if self.backend != "inductor":
            return compile_graph
        refuse_missing_tools(device)
        options = torch._inductor.list_mode_options(self.mode or "default")
        return partial(compile_graph, config_patches={**options, "fallback_random": self.fallback_random})

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        """Let the ranks wait for each other in the rehearsal, whose passes reduce gradients."""
        if self.whole and trainer.strategy.lockstep:
            raise ConfigError(
                f"{KEY}.whole=true: parameters are gathered block by block inside the model, where Dynamo does not "
                f"trace; set {KEY}.whole=false, which compiles the blocks"
            )
        trainer.ranks.set_timeout(trainer.options.timeout_s + COMPILE_S)  # all groups are made by now
        trainer.heartbeat.beat(patience_s=COMPILE_S)
        return run

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        run_pass(batch)  # a single rank has no other rehearsal

    def on_fit_start(self, trainer) -> None:
        trainer.ranks.set_timeout(trainer.options.timeout_s)
        graphs, seconds = self._graphs(), sum(counter.seconds for counter in self.counters)
        if not graphs:
            names = ", ".join(sorted({counter.name for counter in self.counters}))
            raise ConfigError(
                f"{KEY}: no {names} was compiled, since the model does not call it as a module or torch skips it; name "
                "other blocks, or give whole=true"
            )
        text = "compile: %d graph(s) of %d kind(s) of blocks in %.1f s, in %s"
        log.info(text, graphs, len(self.counters), seconds, os.environ.get("TORCHINDUCTOR_CACHE_DIR", "memory"))
        if new := [reason for reason, count in graph_breaks().items() if count > self.breaks.get(reason, 0)]:
            log.warning("compile: %d graph break(s), which cut blocks into parts; the first: %s", len(new), new[0])
        for counter in self.counters:
            counter.begin()

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            trainer.metrics["compile/graphs"] = float(self._graphs())
            trainer.metrics["compile/recompiles"] = float(max(counter.recompiles for counter in self.counters))
        self._refuse_more()

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._refuse_more()

    def _graphs(self) -> int:
        return sum(sum(counter.graphs.values()) for counter in self.counters)

    def _refuse_more(self) -> None:
        """Refuse to continue with eager blocks, because a resumed run would compile them and get other bits."""
        for counter in self.counters:
            if counter.recompiles > self.max_recompiles:
                raise ConfigError(
                    f"{KEY}.max_recompiles={self.max_recompiles}: {counter.name} was to be compiled once more, for "
                    f"inputs of {counter.shapes}; give batches few shapes, by padding for example, or raise this limit"
                )


class GraphCounter:
    """A backend of torch.compile for equal blocks, which counts their graphs in training and in evaluation."""

    def __init__(
        self, name: str, compile_graph: GraphCompiler, heartbeat: Heartbeat, most: int, limit_s: float
    ) -> None:
        self.name, self.compile_graph, self.heartbeat = name, compile_graph, heartbeat
        self.most = most  # recompilations after which graphs run eagerly, until the callback ends the run
        self.limit_s = limit_s  # for which other ranks wait for this one after the rehearsal
        self.graphs = {True: 0, False: 0}  # by whether gradients are recorded
        self.expected = UNLIMITED  # graphs per mode that are no recompilations
        self.seconds, self.shapes = 0.0, ""

    def begin(self) -> None:
        """Count further graphs as recompilations, because the rehearsal is over."""
        self.expected = max(self.graphs[True], 1)

    @property
    def recompiles(self) -> int:
        return max(0, max(self.graphs.values()) - self.expected)

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph that torch has traced. `inputs` are its parameters and inputs."""
        mode = torch.is_grad_enabled()
        self.graphs[mode] += 1
        shown = [list(t.shape) for t in inputs if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        self.shapes = ", ".join(map(str, shown[:3]))
        if self.recompiles > self.most:
            return graph.forward
        began = time.monotonic()
        with self._announced():
            compiled = self.compile_graph(graph, inputs)
        seconds = time.monotonic() - began
        self.seconds += seconds
        if self.graphs[mode] > self.expected:
            text = "compile: %s compiled again in %.1f s, for inputs of %s; recompilation %d of at most %d"
            log.info(text, self.name, seconds, self.shapes, self.graphs[mode] - self.expected, self.most)
        return compiled

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Announce long work. After the rehearsal, warn before other ranks give up, because their error will name no
        cause.
        """
        self.heartbeat.beat(patience_s=COMPILE_S)
        if self.expected == UNLIMITED:
            yield
            return
        half = self.limit_s / 2
        text = "compile: %s has compiled for %.3g s, and other ranks wait for trainer.timeout_s=%g at most; raise it"
        timer = threading.Timer(min(half, threading.TIMEOUT_MAX), log.warning, (text, self.name, half, 2 * half))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.heartbeat.beat()


def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward from a function that torch traces."""
    return forward(*args, **kwargs)


def signature(module: nn.Module) -> Any:
    """Return the properties that equal blocks share: the class, and names, shapes and dtypes of the tensors."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return type(module), tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


def graph_breaks() -> dict[str, int]:
    """Return how often torch has cut a graph in this process, by the first line of the reason."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    return {str(reason).strip().partition("\n")[0]: count for reason, count in reasons.items()}


def refuse_missing_tools(device: torch.device) -> None:
    """Refuse Inductor if tools are missing that it needs for its first graph."""
    key, fix = f"{KEY}.backend=inductor", "or leave compile out"
    cuda = device.type == "cuda"
    variable, compilers = ("CC", ("gcc", "clang")) if cuda else ("CXX", ("g++",))
    named = os.environ.get(variable)
    compilers = (named,) if named else compilers
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"{key}: found no working {'C' if cuda else 'C++'} compiler ({' or '.join(compilers)}); install one, name "
            f"one by the variable {variable}, {fix}"
        )
    if not (header := Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise ConfigError(f"{key}: there is no {header}; install Python's headers (python3-dev), {fix}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise ConfigError(
            f"{key}: {folder} is mounted noexec, so compiled code can't be loaded from there; set "
            f"TORCHINDUCTOR_CACHE_DIR to a folder without noexec, {fix}"
        )
    if cuda and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{key}: triton, which makes GPU kernels, is not installed; install triton, {fix}")
