"""The fields of transformers' TrainingArguments, each supported or refused: docs/honoured.md."""

from recipes.honoured import Table
from trainer.config.training_arguments_table import GIVEN, REFUSED, WITHOUT_EFFECT

TRAINING = "recipes/test_huggingface.py::test_losses_and_weights_are_those_of_transformers_trainer"
RATES = "recipes/test_huggingface_honoured.py::test_rates_of_each_schedule_are_transformers_or_it_is_refused"
STEPS = "recipes/test_huggingface_honoured.py::test_steps_are_transformers_or_refused_with_their_number"
KEYS = "config/test_training_arguments.py::test_each_argument_that_is_given_sets_its_key"
COMPARED = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), TRAINING),
    **dict.fromkeys(("max_steps", "max_grad_norm", "average_tokens_across_devices"), TRAINING),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"), RATES),
    **dict.fromkeys(("num_train_epochs", "dataloader_drop_last"), STEPS),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), STEPS),
}
ARGUMENTS = Table(
    "Fields of transformers' TrainingArguments",
    {name: COMPARED.get(name, KEYS) for name in GIVEN},
    REFUSED,
    notes=GIVEN,
    without_effect=WITHOUT_EFFECT,
)
TABLES = (ARGUMENTS,)
