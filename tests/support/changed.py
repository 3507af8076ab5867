"""Chooses the tests that a change can affect, by what their files import and name: `./scripts/test --changed`.

Files of the checkout are the nodes of a graph. A Python file reads what it imports anywhere, and modules, files and
folders that its strings name, since tests start commands. Tests also read configs and tools by their names alone, as in
`recipe=toy`. Tests that list folders of the checkout read all files, or all with a suffix.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.cli import ROOT
from support.sources import imported

MAIN = ("main", "origin/main")
EVERY = "*"  # a node that stands for all files, as *.py for all that end so
# Each test needs these. A class of `trainer/__init__.py` is loaded late, and so its imports count nowhere else.
WHOLE = {"tests/conftest.py", "pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/test"}
LAZY = "trainer/__init__.py"
TEXTS = re.compile(r"docs/.*|.*\.md|LICENSE|\.gitignore")  # what only tests of pages read, unless a file names them
TEST = re.compile(r"tests/(.*/)?test_\w+\.py")
LISTING = {"glob", "rglob", "iterdir", "walk"}
DOTTED, FILE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+"), re.compile(r"[\w./-]*\w\.\w+|[\w.-]+(?:/[\w.-]+)+")


class Choice(NamedTuple):
    files: set[str] | None  # of tests; None: all
    said: str
    functions: int = sys.maxsize  # of tests


def choose(root: Path = ROOT) -> Choice:
    """Return the files of tests that need a run for what differs from the main branch."""
    try:
        base, changed = difference(root)
        graph = Graph(root, listed(root))
        files, why = graph.affected(changed)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        return Choice(None, f"all tests: git does not tell what has changed ({error})")
    except (SyntaxError, UnicodeDecodeError) as error:
        return Choice(None, f"all tests: a file can't be read ({error})")
    since = f"{len(changed)} files changed since {base}"
    if files is None:
        return Choice(None, f"all tests, for {since}: any test may need {why}")
    count, total = (sum(tests_in(root / name) for name in chosen) for chosen in (files, graph.tests))
    said = f"{len(files)} of {len(graph.tests)} files with {count} of {total} test functions, for {since}"
    return Choice(files, said, count)


def git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def listed(root: Path) -> set[str]:
    """Return the files of the checkout, with those that git does not know yet."""
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return {name for name in names if (root / name).is_file()}


def difference(root: Path) -> tuple[str, set[str]]:
    """Return the commit where this branch left the main one, and the files that differ from it in the working tree."""
    known = git(
        root, "for-each-ref", "--format=%(refname:short)%00", *(f"refs/{kind}" for kind in ("heads", "remotes"))
    )
    main = next((name for name in MAIN if name in {ref.strip() for ref in known}), None)
    if main is None:
        raise LookupError(f"there is no branch {' or '.join(MAIN)}")
    base = git(root, "merge-base", "HEAD", main)[0].strip()
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return base[:8], {*git(root, "diff", "--name-only", "--no-renames", "-z", base), *new}


def tests_in(file: Path) -> int:
    return len(re.findall(r"^ *(?:async )?def test_", file.read_text(), re.MULTILINE))


class Graph:
    """What each file reads, of the files of a checkout."""

    def __init__(self, root: Path, files: set[str]) -> None:
        self.root, self.files = root, files
        self.tests = set(filter(TEST.fullmatch, files))
        self.modules = {module: name for name in files if name.endswith(".py") for module in modules_of(name)}
        keys = re.findall(r"^  (\w+):", (self.root / "conf" / "config.yaml").read_text(), re.MULTILINE)
        self.keys = {self.modules.get(f"trainer.{key}", "") for key in keys}  # a text means the setting, not the module
        self.named, self.below = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for name in files:
            self.named[Path(name).name].add(name)
            for parent in Path(name).parents[:-1]:
                self.below[parent.as_posix()].add(name)
        self.configs, self.tools = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for name in files:
            if found := re.fullmatch(r"(?:tests/toy/)?conf/\w+/(\w+)\.yaml", name):
                self.configs[found[1]].add(name)
            if found := re.fullmatch(r"trainer/tools/([a-z]\w*)(?:\.py|/.*)", name):
                self.tools[found[1]].add(name)

    def affected(self, changed: set[str]) -> tuple[set[str] | None, str]:
        """Return the files of tests that read one that has changed. None: all, because of the file that is named."""
        readers = self.readers()
        own = {name for name in self.reachable({"tests/conftest.py"}) if name.startswith("tests/")}
        found = set[str]()
        for name in sorted(changed):
            tests = above(readers, [name]) & self.tests
            alone = TEST.fullmatch(name) or TEXTS.fullmatch(name)  # nothing else needs it
            lost = not alone and (name not in self.files or not tests)
            if lost or name in WHOLE | {LAZY} | own:
                return None, name
            found |= tests | above(readers, [EVERY, f"*{Path(name).suffix}"]) & self.tests
        return found, ""

    def reachable(self, names: set[str]) -> set[str]:
        """Return the files of tests/support and the others that these import, without what other folders import."""
        found, todo = set(names), list(names)
        while todo:
            for other in self.imports(todo.pop()) - found:
                if other.startswith("tests/support/"):
                    found.add(other)
                    todo.append(other)
        return found

    def readers(self) -> dict[str, set[str]]:
        """Return the files that read each file."""
        found = defaultdict[str, set[str]](set)
        for name in self.files:
            for other in self.reads(name):
                found[other].add(name)
        return found

    @cache  # noqa: B019 one graph per process
    def reads(self, name: str) -> set[str]:
        found = set[str]()
        if name.endswith(".py"):
            found = self.reads_as_python(name)
        elif name.endswith(".yaml"):
            text = re.sub(r"(^| )#.*", "", (self.root / name).read_text(), flags=re.MULTILINE)
            entries = " ".join(re.findall(r"^ *- (.*)", text, re.MULTILINE))  # of its defaults
            found = self.modules_in(text) | self.by_name(entries)
        if name == "trainer/config/compose.py":
            found.add("conf/config.yaml")
        return found - {name}

    @cache  # noqa: B019
    def nodes(self, name: str) -> list[ast.AST]:
        return list(ast.walk(ast.parse((self.root / name).read_text())))

    def imports(self, name: str) -> set[str]:
        return {self.modules[module] for module in imported(self.nodes(name), self.modules)} - {LAZY}

    def reads_as_python(self, name: str) -> set[str]:
        nodes, found = self.nodes(name), self.imports(name)
        for path in [name, *found]:  # the packages that hold them
            found |= {f"{parent}/__init__.py" for parent in Path(path).parents} & self.files - {LAZY}
        found |= self.data_near(name)
        ours = name.startswith(("tests/", "scripts/"))
        if not ours:  # messages name keys and pages that the module does not read
            return found.union(*(self.modules_in(text) for text in strings(nodes) if DOTTED.fullmatch(text)))
        for text in strings(nodes):
            found |= self.modules_in(text) | self.files_in(text) | self.by_name(text)
        for path in paths(nodes):
            below = {name for name in self.below.get(path, ()) if not name.endswith(".py")}  # those have names
            found |= below | {path} & self.files
        return found.union(listed_in(nodes))

    def data_near(self, name: str) -> set[str]:
        """Return the data that lies with a module: in its folder, and in folders below without modules."""
        folder = Path(name).parent.as_posix()
        data = {path for path in self.below[folder] if not path.endswith((".py", ".md"))}
        nearer = {below for below in self.below if below.startswith(f"{folder}/") and self.has_modules(below)}
        return {path for path in data if not any(path.startswith(f"{below}/") for below in nearer)}

    @cache  # noqa: B019
    def has_modules(self, folder: str) -> bool:
        return any(path.endswith(".py") for path in self.below[folder])

    def modules_in(self, text: str) -> set[str]:
        """Return the modules that a text names, also as the beginning of a class's name."""
        found = set[str]()
        for dotted in DOTTED.findall(text):
            parts = dotted.split(".")
            beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            found |= {self.modules[module] for module in beginnings if module in self.modules}
        return found - self.keys - {LAZY}

    def files_in(self, text: str) -> set[str]:
        """Return the files that a text names by their path, or without folders; the modules of tests are no such."""
        found = set[str]()
        for word in FILE.findall(text):
            if "/" not in word:
                found |= {name for name in self.named.get(word, ()) if not name.endswith(".py")}
            found |= {word} & self.files | self.below.get(word.strip("/"), set())
        return found

    def by_name(self, text: str) -> set[str]:
        """Return the configs that a command's words name, and the tools."""
        tools = {text, *re.findall(r"(?:echelon|trainer\.main) (\w+)", text)}
        configs = re.findall(r"(?:^|[=\[,./:])\s*(\w+)", text)
        found = [self.tools[name] for name in tools if name in self.tools]
        return set[str]().union(*found, *(self.configs[name] for name in configs if name in self.configs))


def modules_of(file: str) -> Iterator[str]:
    """Yield the names that a Python file has as a module: as of the checkout, and as the tests import it."""
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield dotted
    for folder in ("tests.toy.", "tests."):
        if dotted.startswith(folder):
            yield dotted.removeprefix(folder)


def above(readers: dict[str, set[str]], names: Iterable[str]) -> set[str]:
    """Return these and all that read them, also through others."""
    found, todo = set(names), list(names)
    while todo:
        new = readers.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def strings(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the texts of a file that are no docstrings."""
    alone = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            yield node.value


def paths(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the paths that are written with slashes, as in ROOT / "docs" / "errors.md"."""
    divided = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    for node in set[ast.AST](divided) - {node.left for node in divided}:
        parts = list[str]()
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
                parts.insert(0, node.right.value)
            node = node.left
        if parts and fixed(node):
            yield "/".join(parts)


def fixed(node: ast.AST) -> bool:
    """Return whether a path begins with a constant, as ROOT or Path(__file__), which is in the checkout."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute) and node.attr == "__file__":
                return True
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func if isinstance(node.func, ast.Attribute) or not node.args else node.args[0]
        else:
            return False
    return node.id == "__file__" or node.id.isupper()


def listed_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield what a file of tests lists of the checkout: `*.py`, as another suffix, or all."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LISTING:
            pattern = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            if fixed(node.func.value):
                yield f"*{found[0]}" if (found := re.findall(r"\.\w+$", str(pattern))) else EVERY
        elif isinstance(node, ast.Constant) and node.value == "ls-files":
            yield EVERY
