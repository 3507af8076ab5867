"""Writes docs/honoured.md: `PYTHONPATH=tests python -m support.honoured`."""

from recipes.honoured import page
from recipes.huggingface import honoured as huggingface
from recipes.lightning import honoured as lightning
from support.cli import ROOT

PAGE = ROOT / "docs" / "honoured.md"
TABLES = (*lightning.TABLES, *huggingface.TABLES)
INTRODUCTION = """# What other people's code may use

Echelon trains modules, data and arguments of other libraries. A name that is given here has the same effect as in the
library, and a test compares the numbers. Any other name is refused, with the reason or with what to use instead: before
the run, or where user code uses it. Nothing is dropped in silence.

The refusals read these tables. A test compares them with the installed libraries, so a new version can't add a name
that is in neither column: [test_lightning_honoured.py](../tests/recipes/test_lightning_honoured.py) and
[test_training_arguments_table.py](../tests/config/test_training_arguments_table.py). [LightningModules](lightning.md),
[DataLoaders](samples.md#a-dataloader) and [TrainingArguments](huggingface.md#trainingarguments) have pages of their
own.

An argument without effect changes no number: it names files, logs or places. Its row says what happens instead. A field
that is refused may have its default value.

"""


def text() -> str:
    return INTRODUCTION + page(TABLES)


if __name__ == "__main__":
    PAGE.write_text(text())
