"""echelon evaluate CHECKPOINT [KEY=VALUE...]: prints the metrics of a checkpoint's model over validation data."""

import argparse
import sys
from pathlib import Path

from trainer.errors import printable
from trainer.files import no_folders_if_refused, write_json
from trainer.process.exit import run_guarded
from trainer.run_dir import make_parent
from trainer.tools.inference import stored


def main() -> int:
    parser = stored.parser("evaluate", __doc__ or "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the metrics to this file, too")
    arguments = parser.parse_intermixed_args()  # KEY=VALUE may follow an option
    return run_guarded(lambda: evaluate(arguments))


@no_folders_if_refused()
def evaluate(arguments: argparse.Namespace) -> int:
    if arguments.json:
        make_parent("--json", arguments.json)
    metrics = stored.on_ranks(arguments, stored.evaluate)
    if metrics is None:  # another rank prints
        return 0
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{printable(name):<{width}}  {value:.6g}")
    if arguments.json:
        write_json(arguments.json, metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
