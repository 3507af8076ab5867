"""A loop of plain PyTorch, with DDP on several ranks."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from scripts.bench.peers import task

CHECKPOINT = Path("checkpoint.pt")

model = task.model().to(task.DEVICE)
optimizer = task.optimizer(model.parameters())
step, epoch = 0, 0
if CHECKPOINT.exists():
    state = torch.load(CHECKPOINT, map_location=task.DEVICE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step, epoch = state["step"], state["epoch"]
net = model
if task.WORLD > 1:
    dist.init_process_group("nccl" if task.CUDA else "gloo")
    net = DistributedDataParallel(model)
data = task.Random()
sampler = DistributedSampler(data, task.WORLD, task.RANK)
loader = DataLoader(data, task.BATCH, sampler=sampler)
while step < task.STEPS:
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = net(**{key: value.to(task.DEVICE) for key, value in batch.items()})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % task.LOG_EVERY == 0:
            print(step, loss.item())
        if step == task.SAVE_AT and task.RANK == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
            torch.save(state, "partial")
            os.replace("partial", CHECKPOINT)
        task.tick()  # bench
        if step == task.STEPS:
            break
    epoch += 1
if task.WORLD > 1:
    dist.destroy_process_group()
