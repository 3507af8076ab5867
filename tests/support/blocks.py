"""Blocks of code of the pages, and a reader who types all blocks of a page."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
READ_S = 540  # for a page
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "trainer", "recipes") for path in (ROOT / folder).rglob("*.md")),
    ]
)
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- not run: (.*) -->\n *\Z")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    title: str  # the file that a reader saves the block as
    text: str
    reason: str  # for which it is not run; empty if it is

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page. `<!-- not run: REASON -->` in the line before marks one that no test runs."""
    text = (ROOT / page).read_text()
    for found in FENCE.finditer(text):
        indent, language, title, body = found.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        mark = MARK.search(text[: found.start()])
        yield Block(page, text.count("\n", 0, found.start()) + 1, language, title or "", body, mark[1] if mark else "")


# Runs blocks as one reader does: in one folder, and all of Python in one interpreter, as in a notebook.
READER = """
import json, linecache, subprocess, sys
from pathlib import Path

space = {"__name__": "__main__"}
for place, language, title, text in json.load(sys.stdin):
    print("==", place, file=sys.stderr, flush=True)
    if title:
        Path(title).parent.mkdir(parents=True, exist_ok=True)
        Path(title).write_text(text)
    elif language == "bash":
        words = ["bash", "-euo", "pipefail", "-c", text]
        if code := subprocess.run(words, stdin=subprocess.DEVNULL).returncode:
            sys.exit(code)
    elif language == "python":
        linecache.cache[place] = len(text), None, text.splitlines(True), place
        exec(compile(text, place, "exec"), space)
        sys.stdout.flush()
"""


def read(page: str, folder: Path, environment: dict[str, str], python: Path) -> "subprocess.CompletedProcess[str]":
    """Save the titled blocks of a page in a folder, and run the others there, in the page's order."""
    given = [(b.place, b.language, b.title, b.text) for b in blocks(page) if not b.reason]
    return subprocess.run(
        [python, "-c", READER], input=json.dumps(given), cwd=folder, env=environment, capture_output=True, text=True,
        timeout=READ_S,
    )  # fmt: skip


def saved(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of files that a block makes: a titled block, and `cat > FILE <<'END'`."""
    if block.title:
        yield block.title, block.text
    yield from re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block.text, flags=re.DOTALL | re.MULTILINE)


def commands(block: Block) -> Iterator[tuple[list[str], bool]]:
    """Yield the commands of a block of bash as words, without here-documents, and whether each may fail (`||`)."""
    text = re.sub(r"<<'END'\n.*?^END$", "", block.text, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;<>"):
                words.append(word)
            elif words:
                yield words, word == "||"
                words = []


def arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of a command that starts a run, however it is launched; None for any other command."""
    if "trainer.main" in words and words[words.index("trainer.main") - 1] == "-m":
        return words[words.index("trainer.main") + 1 :]
    if words[0] in ("echelon", "./scripts/train") and re.match(r"$|[-+~]|.*=", " ".join(words[1:2])):
        return words[1:]
    return words[2:] if words[:2] == ["sbatch", "scripts/cluster/slurm.sh"] else None
