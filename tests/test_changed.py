"""Which tests a change needs: what imports it, names it or lists its folder. All, where nobody can know."""

import subprocess
from pathlib import Path

import pytest
from support.changed import choose

TREE = {
    "conf/callbacks/other.yaml": "_target_: trainer.callbacks.other.Other",
    "conf/callbacks/seen.yaml": "_target_: trainer.callbacks.seen.Seen",
    "conf/config.yaml": "defaults:\n  - callbacks/seen\ntrainer:\n  plan: 1",
    "docs/page.md": "",
    "docs/read.md": "",
    "tests/checks/stored/a.json": "",
    "tests/checks/test_a.py": "from trainer import a",
    "tests/conftest.py": "from support import always",
    "tests/gpu/conftest.py": "",
    "tests/support/always.py": "",
    "tests/support/alone.py": "",
    "tests/support/cli.py": "COMMAND = 'trainer.main'",
    "tests/test_b.py": "def test_it():\n    from trainer.b import B",
    "tests/test_command.py": "from support.cli import run\nrun(['trainer.plan=2'])",
    "tests/test_files.py": "FILES = list(Path(__file__).parent.rglob('*'))",
    "tests/test_other.py": "OTHER = '+callbacks=[seen,other]'",
    "tests/test_pages.py": "PAGES = list((ROOT / 'docs').glob('*.md'))",
    "tests/test_plan.py": "from trainer.plan import plan",
    "tests/test_read.py": "(ROOT / 'docs' / 'read.md').read_text()",
    "tests/test_report.py": "run(['report', 'runs/a'])",
    "tests/test_toy.py": "TOY = 'recipe=toy'",
    "tests/toy/conf/recipe/toy.yaml": "_target_: toy_recipe.Toy",
    "tests/toy/toy_recipe.py": "from trainer.a import A",
    "trainer/__init__.py": "def __getattr__(name):\n    from trainer.b import B",
    "trainer/a.py": "",
    "trainer/b.py": "'''As trainer.plan.'''\nfrom trainer.a import A\nraise Error('recipe.toy, see docs/read.md')",
    "trainer/callbacks/__init__.py": "",
    "trainer/callbacks/other.py": "",
    "trainer/callbacks/seen.py": "",
    "trainer/config/compose.py": "",
    "trainer/main.py": "def main():\n    from trainer.config import compose",
    "trainer/plan.py": "",
    "trainer/tools/report/assets/page.js": "",
    "trainer/tools/report/run.py": "",
    "trainer/unread.py": "",
}
LISTING = "tests/test_files.py"


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout on a branch that has left the main one."""
    root = tmp_path_factory.mktemp("checkout")
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        git("init", "-q", "-b", "main")
        git("add", ".")
        git("commit", "-qm", "One")
        git("switch", "-qc", "mine")
    return root


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("trainer/a.py", {"tests/checks/test_a.py", "tests/test_b.py", "tests/test_toy.py"}),  # through others
        ("trainer/b.py", {"tests/test_b.py"}),
        ("trainer/callbacks/seen.py", {"tests/test_command.py", "tests/test_other.py"}),  # by default, and by its name
        ("conf/callbacks/other.yaml", {"tests/test_other.py"}),
        ("trainer/callbacks/__init__.py", {"tests/test_command.py", "tests/test_other.py"}),
        ("trainer/plan.py", {"tests/test_plan.py"}),  # the command has the setting `trainer.plan`, not the module
        ("trainer/tools/report/assets/page.js", {"tests/test_report.py"}),
        ("tests/checks/stored/a.json", {"tests/checks/test_a.py"}),
        ("tests/support/cli.py", {"tests/test_command.py"}),
        ("tests/test_b.py", {"tests/test_b.py"}),
        ("tests/toy/toy_recipe.py", {"tests/test_toy.py"}),  # by the config that names it
        ("docs/page.md", {"tests/test_pages.py"}),
        ("docs/read.md", {"tests/test_pages.py", "tests/test_read.py"}),
    ],
)
def test_a_change_needs_the_tests_that_read_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, name: str, tests: set[str]
) -> None:
    monkeypatch.chdir(tree)
    (tree / name).write_text(f"{TREE[name]}\n# new")
    choice = choose(tree)
    git("checkout", name)
    assert choice.files == tests | {LISTING}
    assert choice.functions == ("tests/test_b.py" in tests)


@pytest.mark.parametrize(
    "name",
    [
        "tests/conftest.py",
        "tests/gpu/conftest.py",
        "tests/support/alone.py",
        "tests/support/always.py",
        "trainer/__init__.py",
        "trainer/unread.py",
        "unknown.txt",
    ],
)
def test_what_any_test_may_need_needs_all(tree: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tree)
    (tree / name).write_text("new")
    choice = choose(tree)
    git("stash", "-u")
    assert choice.files is None and choice.said.endswith(
        f"1 files changed since {head(tree)}: any test may need {name}"
    )


def head(tree: Path) -> str:
    return (tree / ".git" / "refs" / "heads" / "main").read_text()[:8]


def test_commits_of_the_branch_count_and_those_of_the_main_one_do_not(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    assert choose(tree).files == set()
    git("switch", "-q", "main")
    Path("trainer/plan.py").write_text("new")
    git("commit", "-qam", "Two")
    git("switch", "-q", "mine")
    Path("trainer/b.py").write_text("new")
    git("commit", "-qam", "Three")
    Path("tests/test_new.py").write_text("")
    assert choose(tree).files == {"tests/test_b.py", "tests/test_new.py", LISTING}
    git("rm", "-qf", "trainer/b.py")
    git("commit", "-qm", "Four")
    assert choose(tree).said.endswith("any test may need trainer/b.py")
    git("rm", "-qf", "tests/support/cli.py")
    assert choose(tree).said.endswith("any test may need tests/support/cli.py")
    Path("scratch.py").write_text("def")
    assert choose(tree).said.startswith("all tests: a file can't be read (")


def test_without_git_or_a_main_branch_all_run(tmp_path: Path) -> None:
    assert choose(tmp_path).files is None
    for name, text in TREE.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    git("init", "-q", "-b", "mine")
    git("add", ".")
    git("commit", "-qm", "One")
    assert "there is no branch main or origin/main" in choose(tmp_path).said and choose(tmp_path).files is None
