"""echelon predict CHECKPOINT --output FILE [KEY=VALUE...]: writes a checkpoint's predictions, in the data's order."""

import argparse
import sys
from pathlib import Path

from trainer.files import no_folders_if_refused
from trainer.inference.predictions import refuse_format
from trainer.process.exit import run_guarded
from trainer.run_dir import make_parent
from trainer.tools.inference import stored


def main() -> int:
    parser = stored.parser("predict", __doc__ or "")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a name .jsonl or .safetensors")
    arguments = parser.parse_intermixed_args()  # KEY=VALUE may follow an option
    return run_guarded(lambda: predict(arguments))


@no_folders_if_refused()
def predict(arguments: argparse.Namespace) -> int:
    refuse_format(arguments.output)
    make_parent("--output", arguments.output)
    predictions = stored.on_ranks(arguments, stored.predict)
    if predictions is None:  # another rank writes
        return 0
    predictions.write(arguments.output)
    print(f"{len(predictions)} predictions of {arguments.split} -> {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
