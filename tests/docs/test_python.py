"""docs/python.md and docs/datasets.md as notebooks: each block is a cell, which a real kernel runs in order."""

import importlib.util
import re
from itertools import chain
from pathlib import Path

import pytest
from support.needs import needs

ROOT = Path(__file__).parents[2]
PAGE, DATASETS = ROOT / "docs" / "python.md", ROOT / "docs" / "datasets.md"


def run(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell prints."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # for which ipykernel leaves standard output alone
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


def cells_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


FAILS = """
import os

def fails():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("trouble")

try:
    launch(fails, devices=2)
except RuntimeError as error:
    print(error)
"""


@needs("nbclient", "nbformat")
@pytest.mark.slow
def test_the_pages_run_as_a_notebook(tmp_path, monkeypatch):
    pages = [cells_of(PAGE), cells_of(DATASETS)]
    assert [len(cells) for cells in pages] == [9, 6]
    if not importlib.util.find_spec("datasets"):
        del pages[1:]
    cells = [*chain(*pages), FAILS]
    printed = dict(zip(cells, run(cells, tmp_path, monkeypatch), strict=True))
    assert re.search(r"^max_steps 20 \d", shown(printed, "fit()\nprint"), re.MULTILINE)
    comment = re.search(r"print\(error\)  # (.*)", PAGE.read_text())
    assert comment and comment[1] in shown(printed, "print(error)  #")
    assert "finished at step 10" in shown(printed, "launch(train")  # rank 0's log, in the cell
    assert re.search("(?s)^launch: rank 1 failed first:.*ZeroDivisionError: trouble$", printed[FAILS].strip())
    for cells in pages[1:]:
        losses = [printed[cell].split()[-1] for cell in cells if "print(" in cell]
        assert len(losses) == 6 and all(0 <= float(loss) < 3 for loss in losses)


def shown(printed: dict[str, str], name: str) -> str:
    """What the first cell with this text prints."""
    return next(text for cell, text in printed.items() if name in cell)
