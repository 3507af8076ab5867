"""Every callback, with knobs that suit a short run of the toy, for what is tested of all of them."""

import os
from collections.abc import Callable
from functools import partial

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.compile import Compile
from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.nan_guard.callback import NanGuard
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from trainer.callbacks.shard.callback import Shard
from trainer.callbacks.swa import SWA
from trainer.comm.codecs import registry
from trainer.composition import kind_of, own_targets
from trainer.loggers.csv import CSV
from trainer.loggers.events import Events
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.loggers.tensorboard import TensorBoard
from trainer.monitors.advice.callback import Advice
from trainer.monitors.comm_monitor import CommMonitor
from trainer.monitors.gpu_monitor.callback import GpuMonitor
from trainer.monitors.memory.callback import Memory
from trainer.monitors.profiler.callback import Profiler
from trainer.monitors.step_timer import StepTimer
from trainer.monitors.throughput import Throughput

Table = dict[str, Callable[[], Callback]]

RANKS = int(os.environ.get("CONTRACT_RANKS", "3"))  # on which the contract is tested: 3, or 4 for stages with replicas
STAGES = 3 if RANKS == 3 else 2

OBSERVERS: Table = {
    "advice": Advice,
    "comm_monitor": CommMonitor,
    "csv": CSV,
    "early_stop": lambda: EarlyStop(patience=5),
    "events": Events,
    "gpu_monitor": lambda: GpuMonitor(every_s=0.01),
    "memory": Memory,
    "metrics_file": MetricsFile,
    "profiler": lambda: Profiler(first=2, active=2),
    "progress": Progress,
    "reduce_lr_on_plateau": lambda: ReduceLROnPlateau(patience=5),
    "step_timer": StepTimer,
    "tensorboard": TensorBoard,
    "throughput": Throughput,
}
# What changes training. `grad_compress` is there once for each codec, under its name; `callback.knob` is the callback
# with another knob.
CHANGES: Table = {
    "activation_checkpoint": ActivationCheckpoint,
    "activation_checkpoint.selective": lambda: ActivationCheckpoint(policy="selective"),
    "activation_checkpoint.budget": lambda: ActivationCheckpoint(budget=0.8),
    "activation_checkpoint.offload": lambda: ActivationCheckpoint(policy="offload"),
    "auto_batch": AutoBatch,
    "bucket": lambda: Bucket(mib=0.01),
    "compile": lambda: Compile(backend="aot_eager"),
    "ema": lambda: EMA(decay=0.8),
    "hetero_batch": lambda: HeteroBatch(shares=[1.0] * RANKS),  # others would draw other random numbers
    "hierarchical": lambda: Hierarchical(ranks_per_node=1),
    "local_sgd": lambda: LocalSGD(every=2),
    "nan_guard": lambda: NanGuard("rollback", loss_spike=5.0, norm_spike=5.0, every=2),
    "onebit_adam": lambda: OneBitAdam(warmup_steps=3),
    "optimizer_in_backward": OptimizerInBackward,
    "overlap": Overlap,
    "pipeline": lambda: PipelineParallel(stages=STAGES, schedule="gpipe"),
    "pipeline.2bw": lambda: PipelineParallel(stages=STAGES, schedule="pipedream_2bw"),
    "shard": Shard,
    "shard.2": lambda: Shard(stage=2),
    "shard.3": lambda: Shard(stage=3),
    "swa": lambda: SWA(start=2, every=2),
}
CODECS: Table = {
    "bf16": GradCompress,
    "fp16": lambda: GradCompress("fp16"),
    "int8": lambda: GradCompress("int8"),
    "topk": lambda: GradCompress("topk", density=0.3),
    "dgc": lambda: GradCompress("dgc", density=0.3),
    "sign": lambda: GradCompress("sign"),
    "powersgd": lambda: GradCompress("powersgd", rank=2),
    "blocksparse": lambda: GradCompress("blocksparse", block=4),
    "topk between nodes": lambda: GradCompress("topk", density=0.3, level="inter"),
}
ELSEWHERE = {"grad_compress", "mlflow", "wandb"}  # the codecs above, and loggers that need a server

# A callback or a codec without a row has its defaults.
CODECS |= {name: partial(GradCompress, name) for name in registry.CODECS if name not in CODECS}
for name in sorted(own_targets().keys() - {row.partition(".")[0] for row in (*OBSERVERS, *CHANGES)} - ELSEWHERE):
    (OBSERVERS if kind_of(name).role in (Role.MEASURE, Role.OBSERVE) else CHANGES)[name] = kind_of(name)


def name_of(row: str) -> str:
    """The callback's, as the config has it."""
    return "grad_compress" if row in CODECS else row.split(".")[0]
