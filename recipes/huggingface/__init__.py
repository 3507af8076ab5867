"""Any transformers model that returns a loss, on data of the user's."""

from recipes.huggingface.recipe import HuggingFace

__all__ = ["HuggingFace"]
