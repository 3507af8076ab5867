"""Pages, docstrings and messages use a native reader's words, and sentences of a bearable length."""

import ast
import re
from collections.abc import Iterator

from support.cli import ROOT
from support.sources import trees

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("trainer/**/*.md"),
    ROOT / "docs/measurements/index.md",  # the others there are printed by benches
]
SOURCES = ("trainer", "recipes", "echelon", "scripts")
MADE = ROOT / "docs" / "composition.md"  # by tests/composition.py from messages, which are read in their source
MOST_WORDS = 32
OPENERS = ("Of", "That")  # sentences that leave out their noun
BANNED = re.compile(r"\b(mend(?:s|ed|ing)?|anew|beside|way out|told|for ever|is no name of|goes on)\b", re.IGNORECASE)


def blocks(markdown: str) -> Iterator[str]:
    """Yields paragraphs and items of lists, without code, tables, headings and addresses of links."""
    text = re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *(\||#|\[[^]]+\]: |@).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^.*\S {3,}\S.*$", "", text, flags=re.MULTILINE)  # tables of docstrings
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    yield from re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", "\n" + text)


def sentences(block: str) -> list[str]:
    text = re.sub(r"\b(et al|vs|Inc)\.", r"\1", " ".join(block.split()))
    return re.split(r"(?<=[.?!])[)*\"]* (?=[\W\dA-Z])", text)


def faults(text: str) -> Iterator[str]:
    for block in blocks(text):
        for sentence in sentences(block):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MOST_WORDS:
                yield f"{len(words)} words: {sentence}"
            if words and words[0].strip('*_("') in OPENERS:
                yield f"opens with {words[0]}: {sentence}"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the docstrings, with each entry of Args and Raises as a paragraph."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, re.sub(r"\n *(?=[\w*, ]+:\s)", "\n\n", text)


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the texts of exceptions and of the log; a semicolon ends a sentence there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            call = node
        else:
            continue
        for text in call.args[:1]:
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            said = "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in parts)
            yield node.lineno, said.replace(";", ".\n\n")


def test_sentences_of_pages() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {fault}" for path in PAGES if path != MADE for fault in faults(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_sentences_of_sources() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for folder in SOURCES
        for path, tree in trees(folder).items()
        for line, text in [*docstrings(tree), *messages(tree)]
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)


def test_words_of_pages() -> None:
    """Measurements too: what a bench prints has the words of sources."""
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in [*PAGES, *ROOT.glob("docs/measurements/*.md")]
        for block in blocks(path.read_text())
        for word in BANNED.findall(" ".join(block.split()))
    ]
    assert not found, "\n".join(found)


def test_words_of_sources() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for folder in SOURCES
        for path, tree in trees(folder).items()
        for line, text in [*docstrings(tree), *messages(tree)]
        for word in BANNED.findall(re.sub(r"`[^`]+`", "CODE", text))
    ]
    assert not found, "\n".join(found)
    assert BANNED.findall("The run goes on beside it. Mended.") == ["goes on", "beside", "Mended"]


def test_a_long_sentence_is_found() -> None:
    long = "word " * 33 + "end."
    assert len(list(faults(f"Short one. {long}"))) == 1
    assert len(list(faults(f"- Short one.\n- {long}\n"))) == 1
    assert len(list(faults("It is so. Of the run, the name."))) == 1
    assert not list(faults(f"`{long}`\n\n```\n{long}\n```\n| {long} |\n"))
