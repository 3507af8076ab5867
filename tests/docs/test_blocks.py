"""Every block of code of the pages: its language, its settings, and a run of all blocks of a page in a fresh copy.

A block of `text` is output or a picture. A titled block is saved under its title. `<!-- not run: REASON -->` before a
block leaves it out; NOT_RUN counts these, so none is left out silently.
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support import checkout
from support.blocks import PAGES, Block, arguments, blocks, commands, read, saved
from support.quick import one_of

from trainer.config.check import check
from trainer.config.compose import compose
from trainer.config.folders import CONF, config_dirs
from trainer.config.schema import constant, knobs

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"bash", "python", "yaml", "text"}
NOT_RUN = {"a GPU": 3, "a cluster": 17, "a server": 2, "installs": 3, "minutes": 8, "needs a run": 1, "root": 3}
NOT_RUN |= {"serves until Ctrl-C": 2, "two whole runs": 2}
STARTS = {"python", "python3", "torchrun", "srun", "mpirun", "sbatch", "echelon", "pip", "git", "./scripts/train"}
RUN = sorted({block.page for block in BLOCKS if block.language in ("bash", "python") and not block.reason})
SHOWS = ("--cfg", "--help", "--version")  # words with which no run starts


def places(found: list[Block]) -> str:
    return "\n".join(block.place for block in found)


def test_every_block_has_a_language() -> None:
    way_out = "write ```bash or ```python (run), ```yaml, or ```text (output and pictures)"
    wrong = [block for block in BLOCKS if block.language not in LANGUAGES]
    assert not wrong, f"{way_out}:\n{places(wrong)}"
    fences = sum(text.startswith("```") for page in PAGES for text in lines(page))
    assert fences == 2 * len(BLOCKS), "a fence is not closed, or is not read"


def lines(page: str) -> list[str]:
    return [line.strip() for line in Path(checkout.ROOT, page).read_text().splitlines()]


def test_text_hides_no_command() -> None:
    texts = [block for block in BLOCKS if block.language == "text"]
    hidden = [
        block for block in texts if all(line.split()[0] in STARTS for line in block.text.splitlines() if line.strip())
    ]
    assert not hidden, f"these are commands, so write ```bash:\n{places(hidden)}"


def test_every_block_that_is_not_run_is_counted() -> None:
    assert Counter(block.reason for block in BLOCKS if block.reason) == NOT_RUN
    marks = sum(line.startswith("<!-- not run") for page in PAGES for line in lines(page))
    assert marks == sum(NOT_RUN.values()), "a mark is not in the line before a block"


@pytest.mark.parametrize("page", one_of(3, sorted({block.page for block in BLOCKS if block.language != "text"})))
def test_settings_of_the_commands(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the commands that are not run: each key exists, and each value has its type."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    monkeypatch.setattr(sys, "argv", ["echelon"])
    (tmp_path / "conf").mkdir()
    knobs.cache_clear()  # each page has a package `mine` of its own
    constant.cache_clear()
    for block in blocks(page):
        for name, text in saved(block):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "yaml":
            assert yaml.safe_load(block.text), block.place
        elif block.language == "bash":
            for words, may_fail in commands(block):
                given = arguments(words)
                if given is None or may_fail or set(given) & set(SHOWS) or "+tuned=" in str(given):  # a file of tune's
                    continue
                for job in compose(given, [CONF, *config_dirs(given)]):
                    check(job.config)


def test_the_guides_name_keys_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    monkeypatch.setattr(sys, "argv", ["echelon"])
    rows = [line.split(" | ")[1] for line in lines("docs/guides.md") if line.startswith("| ")]
    named = set(re.findall(r"(?<=[` '])((?:\w+\.)*\w+)=", " ".join(rows)))
    added = sorted(set(",".join(re.findall(r"\+callbacks=\[([\w,]+)\]", " ".join(rows))).split(",")))
    (job,) = compose([f"+callbacks=[{','.join(added)}]"], [CONF])
    missing = [key for key in named if not exists(job.config, key.split("."))]
    assert len(named) > 40
    assert not missing


def exists(config: object, key: list[str]) -> bool:
    return not key or (isinstance(config, dict) and key[0] in config and exists(config[key[0]], key[1:]))


def test_a_block_is_found_and_run_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    parts = [
        '~~~yaml title="a/b.yaml"\nx: 1\n~~~\n- item\n',
        "  ~~~bash\n  cat a/b.yaml >c\n  ~~~",
        "<!-- not run: a GPU -->\n~~~bash\nexit 1\n~~~",
        '~~~python\nx = "2"\n~~~',
        '~~~python\nopen("d", "w").write(x)\n~~~\n',
    ]
    page.write_text("\n".join(parts).replace("~~~", "```"))
    monkeypatch.setattr("support.blocks.ROOT", tmp_path)
    assert [block.reason for block in blocks("page.md")] == ["", "", "a GPU", "", ""]
    done = read("page.md", tmp_path, dict(os.environ), Path(sys.executable))
    assert done.returncode == 0, done.stderr
    assert ((tmp_path / "c").read_text(), (tmp_path / "d").read_text()) == ("x: 1\n", "2")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose cache all pages share: the text is prepared once."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in RUN if page != "docs/quickstart.md"])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, home: Path) -> None:
    """In a fresh copy, whose recipes are tiny."""
    checkout.copy(tmp_path)
    checkout.install(tmp_path)
    checkout.shrink(tmp_path)
    done = read(page, tmp_path, checkout.environment(tmp_path, home), tmp_path / ".venv" / "bin" / "python")
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
