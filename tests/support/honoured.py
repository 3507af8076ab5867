"""Writes docs/honoured.md: `PYTHONPATH=tests python -m support.honoured`."""

from recipes.honoured import page
from recipes.huggingface import honoured as huggingface
from recipes.lightning import honoured as lightning
from support.cli import ROOT

PAGE = ROOT / "docs" / "honoured.md"
TABLES = (*lightning.TABLES, *huggingface.TABLES)
INTRODUCTION = """# What other people's code may use

You have a LightningModule, a DataLoader or a file of TrainingArguments, and want to know whether Echelon honours all of
it. These tables list every name. A supported name has the same effect as in its library, and a test
compares the numbers. Any other name is refused, before the run or at the place where your code uses it, with the reason
or with what to use instead. Nothing is ignored silently.

The code that refuses reads these same tables. A test compares them with the installed libraries, so that a new version
can't add a name that is missing here: [test_lightning_honoured.py](../tests/recipes/test_lightning_honoured.py) and
[test_training_arguments_table.py](../tests/config/test_training_arguments_table.py). [LightningModules](lightning.md),
[DataLoaders](samples.md#a-dataloader) and [TrainingArguments](huggingface.md#trainingarguments) have pages of their
own.

"Without effect" means that no number depends on the argument, because it only names files, logs or places. Its row
states what happens instead. A field that is refused may keep its default value.

"""


def text() -> str:
    return INTRODUCTION + page(TABLES)


if __name__ == "__main__":
    PAGE.write_text(text())
