"""echelon scale [SETTINGS OF THE RUN] [KEY=VALUE ...]: predicts a run on machines that you do not have.

The cost model of `tune` predicts speed, efficiency, waiting, memory, checkpoints and failures on any number of nodes.
Nothing is trained, and no device is needed. docs/cost-model.md has the formulas, and what they were checked against.

  echelon scale recipe=bert_large nodes=1..4096
  echelon scale recipe=bert_large nodes=1,8,64 machine=8xa100-8x200g ways=ring,shard-3 --png scale.png
  echelon scale recipe=bert_base machine=bench.json nodes=1..64        a file of echelon bench
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.config.check import check
from trainer.config.compose import compose
from trainer.config.folders import CONF, config_dirs
from trainer.errors import ConfigError, printable
from trainer.files import refuse_folder
from trainer.log import show
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded
from trainer.tools.measure.plot import require_matplotlib
from trainer.tools.scale.machines import PRESETS, find
from trainer.tools.scale.options import WAYS, ScaleOptions, read

KEYS = f"""keys:
  nodes=1,8,64,512,4096     numbers of nodes: 4, 1,2,8, or 1..4096, a range that doubles
  machine=8xh100-8x400g     {", ".join(PRESETS)}, or a file of echelon bench
  ways=...                  some of {",".join(WAYS)};
                            config, the run's own callbacks, is added if there are any
  scaling=weak              weak: as many samples on each rank; strong: the run's batch on any number of nodes
  per_rank=0                samples of a rank in a step, for weak; 0: the run's micro_batch, or its batch
  mfu=0.4                   share of the device's peak that the passes reach; measure yours by perf/mfu
  tflops=0, flops=0         peak of a device, operations of a sample; 0: the machine's, the recipe's
  activation_mib=0          MiB that autograd keeps of a sample; 0: memory without activations.
                            Weights, gradients and the optimizer's state are counted in float32
  jitter=0                  standard deviation of a rank's passes, of their mean; ranks wait for the slowest
"""


def scale(options: ScaleOptions, config: dict[str, Any], recipe: str, png: Path | None, file: Path | None) -> None:
    from trainer.composition import arrange
    from trainer.tools.scale import output
    from trainer.tools.scale.rows import own_way, rows
    from trainer.tools.scale.work import count
    from trainer.tools.tune.configs import callbacks_of

    arrange(callbacks_of(config), set())  # refuses callbacks that do not compose, as a run does
    cluster = find(options.machine)
    if options.tflops:
        cluster = replace(cluster, tflops=dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8"), options.tflops))
    counted = count(config, cluster, options)
    work = counted.workload
    per_rank = options.per_rank or config["micro_batch"] or config["batch"]
    batch = config["batch"] if options.scaling == "strong" else None
    ways = {name: WAYS[name] for name in options.ways} | own_way(config)
    micro, frozen = config["micro_batch"], counted.frozen_bytes
    made, left_out = rows(cluster, work, options.nodes, ways, batch, per_rank, micro, frozen)
    if not made:
        raise ConfigError(f"nodes={','.join(map(str, options.nodes))}: {left_out[0]}; give other nodes or ways")
    parameters, rate = sum(work.parameters), 1 / (work.forward_s + work.backward_s)
    how = f"{counted.precision}, mfu {options.mfu:g}"
    print(f"{recipe}: {parameters:,} parameters, {rate:,.1f} samples/s on a device alone ({how})")
    print(f"{options.machine}: {cluster.source}\n\n{output.table(made)}\n", flush=True)
    if not options.activation_mib:
        print("memory: without activations; give activation_mib=NUMBER")
    unknown = [*cluster.unknown, *counted.unknown]
    of_rows = [f"{row.way}: {line}" for row in made for line in row.unknown]
    for line in dict.fromkeys([*unknown, *of_rows, *left_out]):
        print(printable(line))
    if file:
        about = {"recipe": recipe, "options": asdict(options), "parameters": parameters}
        about |= {"precision": counted.precision, "unknown": unknown}
        output.write_json(file, about, made, left_out)
    if png:
        output.plot(png, f"{recipe}, {parameters:,} parameters, {options.machine}, {options.scaling} scaling", made)


def command() -> int:
    parser = ArgumentParser(
        "echelon scale", description=__doc__, epilog=KEYS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="keys below, and settings as of trainer.main")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with your own recipe/NAME.yaml")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the rows; needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    args = parser.parse_args()
    refuse_folder("--json", args.json)
    refuse_folder("--png", args.png)
    require_matplotlib(args.png)
    options, words = read(args.words)
    folder = ["--config-dir", args.config_dir] if args.config_dir else []
    for job in compose([*folder, *words], [CONF, *config_dirs(folder)])[:1]:
        check(job.config)
        show(job.messages)
        scale(options, job.config, job.recipe or "recipe", args.png, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(command))
