"""Writes docs/composition.md: pairs of callbacks, and callbacks with settings, that work or are refused, and why.

    PYTHONPATH=tests python -m support.composition

What the page says is refused is what `arrange` refuses; of what it says works, tests/test_contract.py trains what the
page's head says.
"""

import itertools
import re
from pathlib import Path

from support.callbacks import CHANGES, CODECS, OBSERVERS, Table, name_of
from trainer.callback import arrange
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
SETTINGS = {
    "clip": "trainer.clip_norm",
    "fp16": "trainer.precision=fp16",
    "fp8": "trainer.precision=fp8",
    "bf16_params": "trainer.precision=bf16_params",
    "bf16_weights": "trainer.master_weights=false",
    "find_unused_parameters": "trainer.ddp.find_unused_parameters",
    "static_graph": "trainer.ddp.static_graph",
    "gradient_as_bucket_view": "trainer.ddp.gradient_as_bucket_view",
}
# Knobs with which a callback refuses more than without them.
KNOBS: Table = {
    "bucket.first_mib": lambda: Bucket(first_mib=1.0),
    "bucket.mibs": lambda: Bucket(mibs=[1.0, 25.0]),
    "bucket.late": lambda: Bucket(late=["*bias"]),
    "grad_compress.clip_norm": lambda: GradCompress("dgc", clip_norm=1.0),
    "grad_compress.momentum": lambda: GradCompress("dgc", momentum=0.9),
}
ALL = {**CHANGES, **CODECS, **OBSERVERS, **KNOBS}
HEAD = f"""# What composes

`tests/support/composition.py` makes this page from the roles and conflicts of callbacks; a test fails if the page is
outdated. `+` means that both run together. A number means that a run with both is refused before its first step; the
reason under that number names the way out. A codec's row is `grad_compress` with that codec.

`tests/test_contract.py` trains the callbacks on 3 ranks, or on 4 with `CONTRACT_RANKS=4`, with accumulation and uneven
batches. It compares the result with plain training or with the stated bound, and resumes it bit for bit.
`./scripts/test` trains every callback and every codec alone, and the pairs that change the same thing.
`./scripts/test -m pairs` trains every other pair (with bf16 for `grad_compress`), and every codec with `overlap` and
`local_sgd`. `auto_batch` and `hetero_batch` have even shares there; their own tests have others.
`tests/test_settings.py` trains most callbacks with each setting of DDP, with clipping and with fp16.

{", ".join(f"`{name}`" for name in OBSERVERS)} compose with all of these, and with each other.
"""


def refusal(one: str, other: str) -> str:
    """What `arrange` says of two callbacks, or of a callback and a setting; empty where it takes them."""
    rows = [one] if other in SETTINGS else [one, other]
    if "between nodes" in one + other and "hierarchical" not in rows:
        rows.append("hierarchical")  # which it needs
    try:
        arrange({name_of(row): ALL[row]() for row in rows}, {other} & SETTINGS.keys())
    except ConfigError as error:
        return str(error)
    return ""


def more_refused() -> list[str]:
    """Of each of `KNOBS`: what is refused with it alone."""
    lines = []
    for row in KNOBS:
        plain = name_of(row) if name_of(row) in CHANGES else "dgc"
        reasons = {refusal(row, other): None for other in (*CHANGES, *SETTINGS) if not refusal(plain, other)}
        lines += [f"- `{row}`: {reason}" for reason in reasons if reason]
    return lines


def page() -> str:
    for one, other in itertools.product(OBSERVERS, [*ALL, *SETTINGS]):
        assert one == other or not refusal(one, other), (one, other)
    rows, columns = [*CHANGES, *CODECS], [*CHANGES, *SETTINGS]
    reasons: list[str] = []
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = []
        for column in columns:
            own = column in CHANGES and name_of(row) == name_of(column)
            reason = "" if own else re.sub(r"codec=\w+ (?=gather|keep)", "", refusal(row, column))
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(str(reasons.index(reason) + 1) if reason else "" if own else "+")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    settings = [f"`{name}` is `{key}`." for name, key in SETTINGS.items() if name not in key.split(".")[-1:]]
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    knobs = ["", "Some knobs refuse more:", "", *more_refused()]
    return "\n".join([HEAD, *lines, "", " ".join(settings), "", *numbered, *knobs, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
