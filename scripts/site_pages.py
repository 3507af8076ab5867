"""Hooks of mkdocs: README and the cards become pages, and a link to a source file leads to a copy of its text."""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {ROOT / "README.md": "index.md"} | {
    ROOT / f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG")
}
CARDS = "CARDS"  # the entry of the navigation that stands for all cards
LINK = re.compile(r"(?<=\]\()([^)\s#]+)|(?<=\]: )([^\s#]+)$", re.MULTILINE)
ITEM = re.compile(r"(?:[-*]|\d+\.) +")


def cards() -> dict[Path, str]:
    """Return the pages of the cards that lie next to the modules, by file."""
    found = sorted((ROOT / "trainer").glob("*/**/*.md"))
    names = {path: path.parent.name if path.stem == "README" else path.stem for path in found}
    return {path: f"callbacks/{name}.md" for path, name in sorted(names.items(), key=lambda item: item[1])}


def pages() -> dict[Path, str]:
    """Return all pages, by file."""
    return PAGES | cards() | {path: path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def links(page: Path) -> Iterator[Path]:
    """Yield the files and folders that a page links to."""
    for found in LINK.finditer(page.read_text()):
        if ":" not in found[0]:
            yield (page.parent / found[0]).resolve()


def copy_of(path: Path) -> str:
    """Return the place of the copy of a source file or a listing of a folder."""
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}/index.txt" if path.is_dir() else f"source/{name}.txt"


def listing(folder: Path) -> str:
    """Return the names in a folder, with the first line of each docstring."""
    names = [path for path in sorted(folder.iterdir()) if not path.name.startswith(("__", "."))]
    lines = []
    for path in names:
        text = ast.get_docstring(ast.parse(path.read_text())) if path.suffix == ".py" else None
        lines.append(f"{path.name + '/' * path.is_dir():<28}{(text or '').partition(chr(10))[0]}".rstrip())
    return "\n".join([f"{folder.relative_to(ROOT)}/", "", *lines, ""])


def on_config(config: Any) -> None:
    """Put the cards into the navigation."""
    for section in config.nav:
        for entries in section.values():
            if CARDS in entries and isinstance(entries, list):
                entries[entries.index(CARDS) : entries.index(CARDS) + 1] = cards().values()


def on_files(files: Any, config: Any) -> None:
    """Add the pages outside of docs/, and copies of all files that pages link to."""
    from mkdocs.structure.files import File

    known = pages()
    for path, place in known.items():
        if DOCS not in path.parents:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    wanted = {target for page in known for target in links(page) if target.exists() and target not in known}
    for path in sorted(wanted):
        if path.is_dir():
            files.append(File.generated(config, copy_of(path), content=listing(path)))
        elif DOCS not in path.parents:
            files.append(File.generated(config, copy_of(path), abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages and copies, and indent what belongs to an item of a list by 4, as Markdown does here."""
    known = pages()
    origin = next(path for path, place in known.items() if place == page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        target = (origin.parent / found[0]).resolve()
        if ":" in found[0] or not target.exists():  # a missing file is an error of the strict build
            return found[0]
        inside = target.relative_to(DOCS).as_posix() if DOCS in target.parents else copy_of(target)
        place = copy_of(target) if target.is_dir() else known.get(target, inside)
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    return indent(LINK.sub(lead, markdown))


def indent(markdown: str) -> str:
    """Return Markdown in which the lines of an item are indented by 4 instead of the width of its marker."""
    lines, width = [], 0
    for line in markdown.split("\n"):
        if item := ITEM.match(line):
            width = len(item[0])
        elif line and not line.startswith(" "):
            width = 0
        own = width and not item and line.startswith(" " * width)
        lines.append(" " * 4 + line[width:] if own else line)
    return "\n".join(lines)
