"""A tiny causal model with its lines, trained by Echelon and by transformers' Trainer on the same batches."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.huggingface import HuggingFace
from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS, MICRO, SEED = 6, 2, 42
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def write_llama(folder: Path) -> None:
    """Write a tiny causal model with weights, and lines whose labels are of unequal numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    lines = []
    for i in range(40):
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(i)).tolist()
        labels = [-100] * (i % 10) + tokens[i % 10 :]
        lines.append(json.dumps({"input_ids": tokens, "labels": labels, "name": f"line {i}"}))
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")


class Recorded(HuggingFace):
    """Keeps the batches of the steps."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen = [*vars(self).get("seen", ()), {name: value.clone() for name, value in batch.items()}]
        return super().loss(model, batch)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_fit_start(self, trainer) -> None:
        trainer.recipe.seen = []  # of the rehearsal

    def on_step_end(self, trainer) -> None:
        self.losses.append(trainer.metrics["train/loss"])


def by_echelon(
    place: Place, folder: Path, accumulate: int, lora: dict[str, Any] | None = None
) -> tuple[list[float], Any, list[Any]]:
    lines = str(folder / "lines.jsonl")
    recipe = Recorded(str(folder / "llama"), lines, lr_scheduler_type="cosine", warmup_steps=2, lora=lora)
    losses = Losses()
    trainer = Trainer(
        recipe, {"losses": losses}, lambda groups: adamw(groups, **SETTINGS), recipe.schedule,
        batch=MICRO * accumulate * place.world, accumulate=accumulate,
        options=Options(max_steps=STEPS, log_every_steps=1, clip_norm=1.0, run_dir=f"runs/{accumulate}", seed=SEED),
        data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{accumulate}"),
    )  # fmt: skip
    trainer.fit()
    return losses.losses, trainer.module.state_dict(), recipe.seen


def load(folder: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)


def by_transformers(
    place: Place, folder: Path, accumulate: int, batches: list[Any], make: Callable[[Path], nn.Module]
) -> tuple[list[float], Any]:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from torch.utils.data import DataLoader
    from transformers import Trainer as TheirTrainer
    from transformers import TrainingArguments

    class Given(TheirTrainer):
        losses: list[float] = []

        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType] a list of batches

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **options)
            self.losses.append(loss.item())
            return loss

    if place.world > 1:
        store = f"file://{place.store}-theirs-{accumulate}"
        dist.init_process_group("gloo", store, rank=place.rank, world_size=place.world)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        os.environ.update(zip(names, map(str, (place.rank, place.rank, place.world, "localhost", 1)), strict=True))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    Given.losses = []
    arguments = TrainingArguments(
        f"theirs-{place.rank}", use_cpu=True, max_steps=STEPS, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=accumulate, learning_rate=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"],
        lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=1.0, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    torch.manual_seed(SEED)
    theirs = Given(make(folder), arguments)
    theirs.train()
    sums = torch.tensor([sum(Given.losses[i : i + accumulate]) for i in range(0, len(Given.losses), accumulate)])
    if place.world > 1:
        dist.all_reduce(sums)
    return (sums / place.world).tolist(), theirs.accelerator.unwrap_model(theirs.model).state_dict()


def by_both(
    place: Place, folder: Path, lora: dict[str, Any] | None = None, make: Callable[[Path], nn.Module] = load
) -> list[tuple[Any, ...]]:
    """Return the losses and the weights of both trainers, without and with accumulation."""
    import torch.distributed as dist

    environment, results = dict(os.environ), []
    for accumulate in (1, 2):
        losses, weights, batches = by_echelon(place, folder, accumulate, lora)
        own = by_transformers(place, folder, accumulate, batches, make)
        if dist.is_initialized():
            dist.destroy_process_group()
        results.append((losses, weights, *own))
    os.environ.clear()
    os.environ.update(environment)
    return results
