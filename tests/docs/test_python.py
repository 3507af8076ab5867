"""docs/python.md and docs/datasets.md as notebooks: each block is a cell, which a real kernel runs in order."""

import importlib.util
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.needs import needs

ROOT = Path(__file__).parents[2]
PAGE, DATASETS = ROOT / "docs" / "python.md", ROOT / "docs" / "datasets.md"


def run(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell prints."""
    done = executed(cells, folder, monkeypatch)
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in done]


def executed(cells: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells with their outputs."""
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
    return notebook.cells


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


CURVES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from echelon import DataOptions, Options, Trainer, launch

class Line:
    def model(self):
        return nn.Linear(1, 1)
    def data(self, split):
        x = torch.linspace(0, 1, 64)[:, None]
        return TensorDataset(x, 2 * x)
    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
    def predict(self, model, batch):
        return {"y": model(batch[0]).squeeze(1)}

def make():
    options = Options(max_steps=60, log_every_steps=10, validate_every=20)
    return Trainer(Line(), batch=16, options=options, data=DataOptions(workers=0))

trainer = make()
trainer
"""
RANKS = """
def train():
    return make().fit()["steps"]

launch(train, devices=2)
"""


@needs("nbclient", "nbformat")
@pytest.mark.slow
def test_what_a_notebook_shows(tmp_path, monkeypatch):
    """One output is replaced as the run goes: a bar and curves. A Trainer, its summary and predictions are tables."""
    cells = executed([CURVES, "trainer.fit()", "trainer.predict()", RANKS], tmp_path, monkeypatch)
    html = [[out["data"]["text/html"] for out in cell.outputs if "text/html" in out.get("data", {})] for cell in cells]
    assert [len(each) for each in html] == [1, 2, 1, 0]
    assert '<td style="text-align: left">0 of 60</td>' in html[0][0]
    panel, summary = html[1]
    assert '<progress value="60" max="60"' in panel and panel.count("<polyline") == 2
    assert re.search(r"train/loss \d[\d.]* at step 60, val/loss \d[\d.]* at step 60", panel)
    assert ">max_steps<" in summary and "<p>64 samples</p>" in html[2][0]
    lines = "".join(out.get("text", "") for out in cells[3].outputs)
    assert re.search(r"^step 10/60  loss", lines, re.MULTILINE)  # the ranks have no kernel, and print lines


@needs("nbclient", "nbformat")
@pytest.mark.slow
def test_the_pages_run_as_a_notebook(tmp_path, monkeypatch):
    pages = [cells_of(PAGE), cells_of(DATASETS)]
    assert [len(cells) for cells in pages] == [12, 6]
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
