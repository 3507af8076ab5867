"""echelon report RUN...: writes one self-contained HTML page that compares runs."""

import sys
import time
import webbrowser
from pathlib import Path

from trainer.errors import ConfigError, printable
from trainer.files import refuse_folder, write_whole
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded
from trainer.tools.report.page import make_page
from trainer.tools.report.run import names_of, read_run

POINTS = 4000  # of a curve of a single run: three for each pixel of a wide screen, so that a zoom shows more


def report(folders: list[Path], out: Path | None, shows: bool) -> int:
    began = time.monotonic()
    out = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    refuse_folder("--out", out)
    runs = [
        read_run(folder, name, POINTS // len(folders) + 250)
        for folder, name in zip(folders, names_of(folders), strict=True)
    ]
    content = make_page(runs).encode("utf-8", "replace")
    try:
        write_whole(out, content)
    except OSError as error:
        raise ConfigError(f"--out={out}: can't be written: {error.strerror}; give another file") from None
    for run in runs:
        for note in run.notes:
            print(printable(f"{run.name}: {note}"))
    print(printable(f"{out}: {len(content) / 1e6:.1f} MB in {time.monotonic() - began:.1f} s"))
    if shows and not webbrowser.open(out.resolve().as_uri()):
        print(printable(f"--open: no browser was found; open {out.resolve()} in one"))
    return 0


def main() -> int:
    parser = ArgumentParser(prog="echelon report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, as in runs/NAME")
    parser.add_argument("--out", type=Path, help="the page; RUN/report.html, or report.html for several runs")
    parser.add_argument("--open", action="store_true", help="shows the page in a browser")
    given = parser.parse_args()
    return run_guarded(lambda: report(given.runs, given.out, given.open))


if __name__ == "__main__":
    sys.exit(main())
