"""docs/python.md and docs/datasets.md as notebooks: each block is a cell, which a real kernel runs in order."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
PAGE, DATASETS = ROOT / "docs" / "python.md", ROOT / "docs" / "datasets.md"


def run(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell prints."""
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
    cells = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(cells) > 5
    return cells


def test_the_page_about_data_sets_runs_as_a_notebook(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    cells = cells_of(DATASETS)
    losses = [
        text.split()[-1]
        for cell, text in zip(cells, run(cells, tmp_path, monkeypatch), strict=True)
        if "train(" in cell
    ]
    assert len(losses) == 6 and all(0 <= float(loss) < 3 for loss in losses)


def test_the_page_runs_as_a_notebook(tmp_path, monkeypatch):
    cells = cells_of(PAGE)
    printed = dict(zip(cells, run(cells, tmp_path, monkeypatch), strict=True))
    shown = {name: next(text for cell, text in printed.items() if name in cell) for name in ("fit()\nprint", "except")}
    assert re.search(r"^max_steps 20 \d", shown["fit()\nprint"], re.MULTILINE)
    comment = re.search(r"print\(error\)  # (.*)", PAGE.read_text())
    assert comment and comment[1] in shown["except"]
    launched = next(text for cell, text in printed.items() if "launch(train" in cell)
    assert "finished at step 10" in launched  # rank 0's log, in the cell


RANKS = """
import os
import time

from echelon import launch

def fails():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("trouble")
    time.sleep(600)

launch(fails, devices=2)
"""


def test_a_failed_rank_is_an_error_of_the_cell(tmp_path, monkeypatch):
    with pytest.raises(
        CellExecutionError, match=r"(?s)RuntimeError: launch: rank 1 failed first.*ZeroDivisionError: trouble"
    ):
        run([RANKS], tmp_path, monkeypatch)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("runs")]
