"""Blocks of code of the pages, and a script of all blocks of a page, as a reader would type them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "trainer/**/*.md", "recipes/**/*.md")
    for path in ROOT.glob(pattern)
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


def script(page: str) -> str:
    """Return a bash script that saves each titled block, and runs the others, in the page's order."""
    parts = ["set -euo pipefail"]
    for block in blocks(page):
        if block.reason or block.language == "text":
            continue
        parts.append(f"echo '== {block.place}' >&2")
        if block.title:
            folder = shlex.quote(str(Path(block.title).parent))
            parts.append(
                f"mkdir -p {folder}\ncat >{shlex.quote(block.title)} <<'END OF BLOCK'\n{block.text}END OF BLOCK"
            )
        elif block.language == "python":
            parts.append(f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK")
        elif block.language == "bash":
            parts.append(block.text)
    return "\n".join(parts) + "\n"


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
