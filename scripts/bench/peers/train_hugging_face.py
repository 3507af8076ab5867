"""Trainer of transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from scripts.bench.peers import task


class Tick(transformers.TrainerCallback):  # bench
    def on_step_end(self, *_: Any, **__: Any) -> None:  # bench
        task.tick()  # bench


model = task.model()
optimizer = task.optimizer(model.to(task.DEVICE).parameters())
arguments = transformers.TrainingArguments(
    "out",
    max_steps=task.STEPS,
    per_device_train_batch_size=task.BATCH,
    logging_steps=task.LOG_EVERY,
    save_strategy="steps",
    save_steps=task.SAVE_AT,
    max_grad_norm=0.0,
    remove_unused_columns=False,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not task.CUDA,
)
trainer = transformers.Trainer(
    model,
    arguments,
    train_dataset=task.Random(),
    optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    callbacks=[Tick()],
)
trainer.train(resume_from_checkpoint=any(Path("out").glob("checkpoint-*")))
