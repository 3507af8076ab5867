"""The thresholds of advice: each rule reads numbers of a logged step, and names the setting that fixes a problem."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.callback import Symptom
from trainer.composition import in_words, remedies

# A number beyond its limit is a finding. The card has the source of each.
UTILISATION = 0.85  # of a GPU's time
SWING = 0.15  # between the largest and the smallest sample of utilisation
COMMUNICATION = 0.3  # of the forward and backward passes
DATA = 0.05  # of the step
HANDOVER = 0.02  # in a shorter wait for data, a step gains nothing from workers: the handover takes as long
CHECKPOINT = 0.035  # of the steps since the first logged one
STRAGGLER = 0.1  # of the step, between what the slowest and the fastest rank compute
SKEW = 0.2  # of the largest peak of memory
SKEW_GIB = 1.0  # a smaller difference is not judged
PCIE = 0.8  # of what the link transmits
FEW_MIB = 1.0  # of gradients: their transfer takes less time than its start, which no callback shortens
ROOM = 2  # times a rank's samples that its memory would take
MOST_MEMORY = 0.9  # of the device, for a larger micro-batch
ALL = -1  # the subject of a finding that is of no rank alone
OF_RANK = {"data": "_max", "communication": "_min"}  # of which rank a part counts, where others wait for a rank

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """The settings of a run that advice depends on."""

    world: int
    nodes: int
    data_world: int
    cuda: bool
    precision: str
    batch: int
    micro: int
    accumulate: int
    splits: bool  # a callback decides the micro-batches
    workers: int
    prefetch: int
    gradient_mib: float  # MiB of the gradients that a rank sends in a step
    cores: int  # of the machine or its container, for each of its ranks
    fixed_interval: bool  # checkpoints come by steps or minutes, and not by auto
    profiles: bool  # has the callback profiler
    offloads: str  # the callback that moves activations to the host; ""
    skips: bool  # a checkpoint that is due while the previous one is being written
    pcie_mib_s: float  # that the GPU's link transmits, each way; 0: unknown
    fits: Callable[[], int]  # samples of the largest micro-batch that would fit into memory; 0: unknown
    accepts: Callable[..., bool]  # whether the run takes a callback of this name, with these knobs, too


@dataclass(frozen=True)
class Finding:
    """A number beyond its limit, and the settings that fix it, as arguments of the command."""

    name: str
    value: float
    limit: float
    text: str
    config: str
    subject: int = ALL  # the rank concerned; findings of the same name and subject are one


Rule = Callable[[Numbers, Run], Finding | None]


def find(numbers: Numbers, run: Run) -> list[Finding]:
    """Return the findings of a logged step. A rule whose numbers are missing or not finite is silent."""
    known = {name: number for name, number in numbers.items() if math.isfinite(number)}
    return [finding for rule in RULES if (finding := rule(known, run)) is not None]


def utilisation(numbers: Numbers, run: Run) -> Finding | None:
    """Judge the rank whose GPU is idlest, because a mean would hide it.

    If the others are busy, the same rank must be idle at each step, because one of many may always pause.
    """
    used, rank = numbers.get("gpu/utilisation_min", 1.0), int(numbers.get("gpu/idlest_rank", 0))
    if used >= UTILISATION:
        return None
    alone = numbers.get("gpu/utilisation", 0.0) >= UTILISATION
    way = ("its kernels are too small or too few", more_work(run))
    if alone:
        way = ("the others are busier", trace(run, f"ranks=[{rank}]"))
    reason, config = cause(numbers, run) or way
    text = f"the GPU of rank {rank} is busy for {used:.0%} of the time, and should be for {UTILISATION:.0%}: {reason}"
    return Finding("utilisation", used, UTILISATION, text, config, subject=rank if alone else ALL)


def swing(numbers: Numbers, run: Run) -> Finding | None:
    spread = numbers.get("gpu/utilisation_spread", 0.0)
    if spread <= SWING:
        return None
    reason, config = cause(numbers, run) or ("a trace shows the gaps", trace(run))
    text = f"the GPU's utilisation swings by {spread * 100:.0f} points, more than {SWING * 100:.0f}: {reason}"
    return Finding("utilisation_swing", spread, SWING, text, config)


def communication(numbers: Numbers, run: Run) -> Finding | None:
    share = exposed(numbers)
    if share <= COMMUNICATION:
        return None
    text = f"steps wait for other ranks {share:.2f} times as long as they compute, more than {COMMUNICATION}"
    if is_small(run):
        text += f"; gradients of {run.gradient_mib:.2g} MiB need fewer ranks, or a larger batch, which changes training"
    return Finding("communication", share, COMMUNICATION, text, less_waiting(run))


def data_wait(numbers: Numbers, run: Run) -> Finding | None:
    share = wait_share("data", numbers)
    if share <= DATA:
        return None
    text = f"steps wait for data for {100 * share:.3g}% of their time, more than {DATA:.0%}"
    return Finding("data_wait", share, DATA, text, faster_data(run))


def checkpoint(numbers: Numbers, run: Run) -> Finding | None:
    share, config = numbers.get("advice/checkpoint", 0.0), rarer_checkpoints(run)
    if share <= CHECKPOINT or not config:
        return None
    text = f"checkpoints hold training up for {share:.1%} of its time, more than {CHECKPOINT:.1%}"
    return Finding("checkpoint", share, CHECKPOINT, text, config)


def straggler(numbers: Numbers, run: Run) -> Finding | None:
    spread, rank = numbers.get("time/spread", 0.0), int(numbers.get("time/slowest_rank", 0))
    if spread <= STRAGGLER:
        return None
    text = (
        f"rank {rank} computes longer than the fastest rank by {spread:.0%} of a step, more than {STRAGGLER:.0%}; "
        "others wait for it"
    )
    config = remedy(run, Symptom.SLOW_RANK) or trace(run, f"ranks=[{rank}]")
    return Finding("straggler", spread, STRAGGLER, text, config, subject=rank)


def memory_skew(numbers: Numbers, run: Run) -> Finding | None:
    skew = numbers.get("perf/memory_skew", 0.0)
    most = numbers.get("perf/peak_memory_gib", numbers.get("perf/peak_rss_gib", 0.0))
    if skew <= SKEW or skew * most < SKEW_GIB:
        return None
    text = f"a rank's peak of memory is {skew:.0%} below the largest ({most:.1f} GiB), more than {SKEW:.0%}"
    return Finding("memory_skew", skew, SKEW, text, trace(run, "profile_memory=true"))


def pcie(numbers: Numbers, run: Run) -> Finding | None:
    most = max(numbers.get("gpu/pcie_rx_mib_s", 0.0), numbers.get("gpu/pcie_tx_mib_s", 0.0))
    if not run.pcie_mib_s or (share := most / run.pcie_mib_s) <= PCIE:
        return None
    config = f"callbacks.{run.offloads}.policy=full" if run.offloads else ""
    if not config and run.world > 1:
        config = remedy(run, Symptom.TRAFFIC)
    text = f"PCIe carries {most:,.0f} MiB/s, {share:.0%} of what its link transmits, more than {PCIE:.0%}"
    return Finding("pcie", share, PCIE, text, config or trace(run))


def batch(numbers: Numbers, run: Run) -> Finding | None:
    """Judge only a run that gains from more samples per step: the GPU idles, or communication is exposed."""
    alone = not run.cuda or run.world == 1 or run.accumulate > 1 or run.splits
    busy = numbers.get("gpu/utilisation", 1.0) >= UTILISATION and exposed(numbers) <= COMMUNICATION
    if alone or busy or "perf/peak_memory_gib" not in numbers or (fits := run.fits()) < ROOM * run.micro:
        return None
    micro = run.micro << int(math.log2(fits // run.micro))
    text = (
        f"a step has {run.micro} samples for each of {run.data_world} ranks, whose memory takes {fits}; a larger batch "
        "changes training: scale the learning rate (Goyal et al. 2017)"
    )
    config = f"batch={micro * run.data_world} micro_batch={micro} accumulate=1"
    return Finding("batch", run.micro, fits / ROOM, text, config)


def attention(numbers: Numbers, run: Run) -> Finding | None:
    calls = numbers.get("kernel/math_attention", 0.0)
    if not calls:
        return None
    config = trace(run, "record_shapes=true")
    if run.precision in ("fp32", "tf32"):
        config = "trainer.precision=bf16"
    elif compiled := remedy(run, Symptom.KERNELS):
        config = compiled
    text = f"{calls:.0f} calls of attention a step take torch's math kernel, which keeps the whole matrix in memory"
    return Finding("attention", calls, 0, text, config)


def optimizer(numbers: Numbers, run: Run) -> Finding | None:
    groups = numbers.get("kernel/looping_groups", 0.0)
    if not groups:
        return None
    way = "fused" if numbers.get("kernel/fused_optimizer") else "foreach"
    text = f"the optimizer steps the parameters of {groups:.0f} group(s) one by one, with kernels for each"
    return Finding("optimizer", groups, 0, text, f"optimizer.{way}=true")


def above_0(name: str, number: str, text: str, config: Callable[[Run], str]) -> Rule:
    """Return a rule for a number that should be 0. The text may show it as `{}`."""

    def rule(numbers: Numbers, run: Run) -> Finding | None:
        value = numbers.get(number, 0.0)
        return Finding(name, value, 0, text.format(f"{value:.0f}"), config(run)) if value else None

    rule.__name__ = name
    return rule


RULES: tuple[Rule, ...] = (
    utilisation, swing, communication, data_wait, checkpoint, straggler, memory_skew, pcie, batch, attention, optimizer,
    above_0(
        "tf32", "kernel/without_tf32", "matrix products are in float32 on a GPU with TF32, whose tensor cores they do "
        "not use", lambda run: "trainer.precision=tf32",
    ),
    above_0(
        "graph_breaks", "kernel/graph_breaks", "torch.compile has cut graphs at {} place(s), and runs them in parts",
        lambda run: trace(run, "with_stack=true"),
    ),
    above_0(
        "recompiles", "compile/recompiles", "a block was compiled {} more time(s), for inputs of other shapes; pad "
        "batches to few shapes", lambda run: trace(run, "record_shapes=true"),
    ),
    above_0(
        "unused_parameters", "kernel/no_unused_parameters", "DDP looks for unused parameters in each step, and has "
        "found none", lambda run: "trainer.ddp.find_unused_parameters=false",
    ),
    above_0(
        "gradient_layout", "kernel/copied_gradients", "a gradient has other strides than its bucket, so DDP copies it; "
        "make the parameter contiguous", lambda run: trace(run, "with_stack=true"),
    ),
)  # fmt: skip


def wait_share(part: str, numbers: Numbers) -> float:
    """Return the share of a step's wait; 0 if it is unknown, or a wait for data that workers could not shorten."""
    wait, step = seconds(part, numbers), numbers.get("time/step", 0.0)
    return 0.0 if not step or (part == "data" and wait < HANDOVER) else wait / step


def seconds(part: str, numbers: Numbers) -> float:
    """Return the part's seconds; 0 if unknown. A wait for a rank that lacks data is not communication."""
    mean = numbers.get(f"time/{part}", 0.0)  # all that a single rank has
    return numbers.get(f"time/{part}{OF_RANK.get(part, '')}", mean)


def exposed(numbers: Numbers) -> float:
    """Return the time that steps wait for other ranks, relative to their compute time; 0 if unknown."""
    compute = numbers.get("time/forward", 0.0) + numbers.get("time/backward", 0.0)
    return seconds("communication", numbers) / compute if compute else 0.0


def cause(numbers: Numbers, run: Run) -> tuple[str, str] | None:
    """Return the longest wait of a step and the settings that shorten it; None if no wait counts."""
    waits = {"data": faster_data, "communication": less_waiting, "checkpoint": rarer_checkpoints}
    part = max(waits, key=lambda part: wait_share(part, numbers))
    share = wait_share(part, numbers)
    if share <= DATA:
        return None
    return f"steps wait {share:.0%} of their time for {part}", waits[part](run) or trace(run)


# Settings, as arguments of the command.
def remedy(run: Run, *symptoms: Symptom) -> str:
    """Return the arguments that add the first callback that helps and that the run accepts; "" if there is none."""
    return next((in_words(name, knobs) for name, knobs in remedies(*symptoms) if run.accepts(name, **knobs)), "")


def trace(run: Run, knob: str = "") -> str:
    words = ["" if run.profiles else in_words("profiler", {}), f"callbacks.profiler.{knob}" if knob else ""]
    return " ".join(filter(None, words)) or "callbacks.profiler.with_stack=true"


def faster_data(run: Run) -> str:
    if run.workers < run.cores:
        return f"data.workers={min(run.cores, max(2, 2 * run.workers))}"
    return f"data.prefetch={2 * run.prefetch}"


def is_small(run: Run) -> bool:
    """Return whether ranks that split only the batch send too little for any callback to help."""
    return run.data_world == run.world and run.gradient_mib < FEW_MIB


def less_waiting(run: Run) -> str:
    """Return exact ways first, except for small models. In a pipeline, ranks wait less with more micro-batches."""
    if is_small(run):
        return f"batch={2 * run.batch}"
    if run.data_world < run.world and run.micro % 2 == 0:
        return f"micro_batch={run.micro // 2} accumulate={2 * run.accumulate}"
    symptoms = [Symptom.NETWORK, *([Symptom.NODES] if run.nodes > 1 and run.world > run.nodes else [])]
    return remedy(run, *symptoms) or trace(run)


def rarer_checkpoints(run: Run) -> str:
    """Let the interval follow the stall; then skip checkpoints that are due too soon. "": the run does both."""
    if run.fixed_interval:
        return "trainer.checkpoint.every=auto"
    return "" if run.skips else "trainer.checkpoint.when_busy=skip"


def more_work(run: Run) -> str:
    """Return what gives the GPU larger or fewer kernels without changing the numbers."""
    if not run.splits and run.accumulate % 2 == 0 and run.fits() >= 2 * run.micro:
        return f"micro_batch={2 * run.micro} accumulate={run.accumulate // 2}"
    return remedy(run, Symptom.KERNELS) or trace(run)
