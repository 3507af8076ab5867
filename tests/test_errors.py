"""What can't work ends before anything is started: one line with key, value and way out, and an exit code."""

import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cli import LOADED, PYTHONPATH, QUICK, TOY, Result, run, toy
from support.quick import one_of, selected

LIGHT = ("trainer.main", "trainer.config.check")  # what is loaded where torch must not be, which a test asks for

# What is typed, and indented what the line must say.
WITHOUT_TORCH = """
recipe=tow
    recipe=tow: there is no such recipe; did you mean toy?
'+callbacks=[overlp]'
    callbacks=overlp: there is no such callback; did you mean overlap
callbacks=[xyzzy]
    callbacks=xyzzy: there is no such callback; there are activation_checkpoint,
optimizer=adam
    optimizer=adam: there is no such optimizer; did you mean adamw
optimizer=null
    optimizer=null: a run needs one optimizer; there are adafactor, adagrad, adamw,
    adamw8bit, lamb, lars, muon, recipe, sgd
schedule=cosin
    schedule=cosin: there is no such schedule; did you mean cosine?
--config-dir=nowhere
    --config-dir nowhere: is not a folder; give the one that holds recipe/NAME.yaml
--config-dir=.
    --config-dir .: is a second --config-dir, and only one is read
--batch=3
    --batch=3: there is no such option; give settings as KEY=VALUE, without --; see --help
optimizer.lr
    optimizer.lr: has no value; write optimizer.lr=VALUE, without spaces around =
batch=[1
    batch=[1: can't be read as KEY=VALUE; quote it for the shell
'recipe.text=a(b).txt'
    recipe.text=a(b).txt: can't be read as KEY=VALUE; quote it for the shell
    and text twice, as in 'recipe.text="a(b).txt"'
'+callbacks=[ema' '+callbacks=[overlap]'
    callbacks=[ema: can't be read as KEY=VALUE
~callbacks.progres
    ~callbacks.progres: is not in this run; did you mean ~callbacks.progress?
~callbacks.xyzzy
    ~callbacks.xyzzy: is not in this run; leave this out
--config-name=other
    --config-name other: the only name is config; leave --config-name out
lr=1e-3
    lr=0.001: no such key; did you mean optimizer.lr?
max_step=3
    max_step=3: no such key; did you mean trainer.max_steps
optimizer.learning_rate=1e-3
    optimizer.learning_rate=0.001: no such key; did you mean lr?
trainer.micro_batch=8
    trainer.micro_batch=8: no such key; did you mean micro_batch?
trainer.workers=2
    trainer.workers=2: no such key; did you mean data.workers?
optimizer.warmup=100
    optimizer.warmup=100: no such key; did you mean schedule.warmup?
schedule=constant schedule.floor=0.1
    schedule.floor=0.1: no such key; there are lr_scaling, reference_batch, warmup
optimizer.xyzzy=1
    optimizer.xyzzy=1: no such key; there are betas, eps, lr, weight_decay
recipe=bare
    recipe.recipe: is one level too deep; begin the YAML file with the line '# @package _global_'
recipe=own_optimizer
    optimizer.betas=[0.9, 0.98]: no such key
    for your own optimizer write conf/optimizer/NAME.yaml
RANK=x WORLD_SIZE=2
    RANK=x: is not a number
PMI_RANK=0 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3
    mpirun: 3 ranks need an address to meet at
optimizer.lr=${foo}
    optimizer.lr: Interpolation key 'foo' not found; give a value, or a key that is there

batchs=3
    batchs=3: no such key; did you mean batch
recipe.with=2
    recipe.with=2: no such key; did you mean width?
'+callbacks=[ema]' callbacks.ema.decai=0.9
    callbacks.ema.decai=0.9: no such key; did you mean decay?
callbacks.ema.decay=0.9
    callbacks.ema: is not in this run, which has events, memory, metrics_file, progress, step_timer, throughput; '+
callbacks.progres.columns=3
    callbacks.progres: is not in this run, which has events, memory, metrics_file, progress, step_timer, throughput;
optimizer.lrr=1
    optimizer.lrr=1: no such key; did you mean lr?
schedule.warm=1
    schedule.warm=1: no such key; did you mean warmup?
trainer.max_step=3
    trainer.max_step=3: no such key; did you mean max_steps
+trainer.max_step=3
    trainer.max_step=3: no such key; did you mean max_steps
trainer.checkpoint.every_step=2
    trainer.checkpoint.every_step=2: no such key; did you mean every_steps
trainer.ddp.bucket=2
    trainer.ddp.bucket=2: no such key; did you mean bucket_mib?
data.worker=1
    data.worker=1: no such key; did you mean workers?
data.map=probe.crop
    data.map=probe.crop: must be a list, not str
'data.decoders=[{_target_: probe.Probe, trouble: "", stop: 3}]'
    data.decoders.0.stop=3: no such key; did you mean step

batch=???
    batch=???: has no default; give batch=VALUE
~recipe
    recipe: is missing, and every run needs it
trainer.max_steps=ten
    trainer.max_steps=ten: must be int or null, not str
optimizer.lr=fast
    optimizer.lr=fast: must be float, not str
trainer.accelerator=tpu
    trainer.accelerator=tpu: must be auto or cpu or cuda
'+callbacks=[grad_compress]' callbacks.grad_compress.codec=int7
    callbacks.grad_compress.codec=int7: must be bf16 or fp16
data=null
    data=null: must be dict
recipe.width=1.5
    recipe.width=1.5: must be int, not float
optimizer.betas=[0.9]
    optimizer.betas=[0.9]: must be [float, float]
-m optimizer.lr=1e-3,fast
    optimizer.lr=fast: must be float, not str
optimizer._target_=os.system
    optimizer._target_=os.system: os is not a package that configs may name;
    if you trust it, add 'trainer.allow_targets=[toy_recipe,probe,os]'
schedule._target_=trainer.optim.schedule.math.floor
    schedule._target_=trainer.optim.schedule.math.floor: is not a name that Echelon's conf/ has
schedule._target_=trainer.optim.schedule.math
    schedule._target_=trainer.optim.schedule.math: is not a name that Echelon's conf/ has
schedule._target_=trainer.optim.schedule.require
    schedule._target_=trainer.optim.schedule.require: is not a name that Echelon's conf/ has
schedule._target_=trainer.config.build
    schedule._target_=trainer.config.build: is not a name that Echelon's conf/ has
'+recipe.dtype={_target_: os.system, command: ls}'
    recipe.dtype._target_=os.system: a _target_ inside arguments is not built; give a plain value
+recipe.hub_token=abc
    recipe.hub_token=***: no such key

batch=0
    batch=0: must be at least 1
trainer.max_steps=-1
    trainer.max_steps=-1: must be at least 0
trainer.devices=0
    trainer.devices=0: must be at least 1
trainer.log_every_steps=0
    trainer.log_every_steps=0: must be at least 1
trainer.clip_norm=0
    trainer.clip_norm=0: must be more than 0
trainer.clip_value=-1
    trainer.clip_value=-1: must be more than 0
trainer.clip_norm=1 trainer.clip_value=0.5
    trainer.clip_value=0.5: gradients are clipped by trainer.clip_norm=1
    set one of the two to null
trainer.checkpoint.keep=1
    trainer.checkpoint.keep=1: must be at least 2
data.workers=-1
    data.workers=-1: must be at least 0
trainer.ddp.bucket_mib=-1
    trainer.ddp.bucket_mib=-1: must be more than 0
schedule.reference_batch=0
    schedule.reference_batch=0: must be at least 1
'trainer.validate_every=5 stepz'
    trainer.validate_every=5 stepz: is not a duration; write for example trainer.validate_every='200 steps'
'schedule.warmup=1.1.1 steps'
    schedule.warmup=1.1.1 steps: is not a duration; write for example schedule.warmup='200 steps'
trainer.validate_every=0
    trainer.validate_every=0: must be more than 0; give null to validate only at the end
trainer.devices=2 batch=13
    batch=13: does not divide into 2 rank(s); nearest that do: batch=12, batch=14
trainer.devices=1 micro_batch=5
    batch=12: does not divide into 1 rank(s), micro_batch=5; nearest that do: batch=10, batch=15; or micro_batch=4
trainer.nodes=2
    trainer.nodes=2: this process can't start other nodes; use torchrun --nnodes=2 ... on each node, or srun
RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 trainer.devices=3
    trainer.devices=3: torchrun started 2 rank(s) on this node; use trainer.devices=2 or leave trainer.devices out
RANK=1 WORLD_SIZE=2 -m batch=12,24
    -m: gives 2 runs, and torchrun started 2 ranks for one; call torchrun once per run, or start all runs without
    trainer.devices=N
"""
WITH_TORCH = """
trainer.accelerator=cuda trainer.devices=64 batch=64
    trainer.accelerator=cuda: torch sees no CUDA device; use trainer.accelerator=cpu, or a CUDA build of torch
trainer.accelerator=cpu trainer.backend=nccl trainer.devices=2
    trainer.backend=nccl: needs CUDA, and this run is on cpu; use trainer.backend=gloo
trainer.accelerator=cpu trainer.precision=tf32 trainer.devices=2
    trainer.precision=tf32: cpu has no TF32; use trainer.precision=auto
optimizer.lr=-1
    optimizer.lr=-1: must be more than 0
'optimizer.groups=[{match: "blcks.*", lr_scale: 0.1}]'
    optimizer.groups.0.match=blcks.*: no parameter has such a name; did you mean blocks.*
optimizer=lars 'optimizer.groups=[{match: "blocks.*", freeze: true},{match: "*", freeze: true}]'
    recipe.model(): all 8 parameters are frozen; return one with parameters that require a gradient
optimizer=adamw8bit optimizer.min_8bit_size=64 'optimizer.groups=[{match: "first.*", min_8bit_size: 128}]'
    optimizer.groups.0.min_8bit_size=128: AdamW8bit has no such setting of a group
trainer.max_steps=null
    trainer.max_steps=null: schedule=linear must know the end of the run; give trainer.max_steps or trainer.max_epochs
trainer.checkpoint.dir=file/ckpt trainer.devices=2
    trainer.checkpoint.dir=file/ckpt: can't be written: Not a directory; give another folder
'+callbacks=[overlap]' trainer.clip_norm=1 trainer.devices=2
    overlap and clip can't run together: the global norm
    set trainer.clip_norm=null or leave overlap out
'+callbacks=[ema,average]'
    average and ema both decide how weights are averaged (role AVERAGE): leave one out
trainer.resume=ckpt/last.pt
    trainer.resume=ckpt/last.pt: does not exist; give DIR/last.pt, DIR/best.pt, a folder step-*, a run's folder, or auto
trainer.resume=BASE/ckpt/damaged
    model.safetensors: its sha256 is not the manifest's; trainer.resume=null starts a new run
trainer.resume=BASE/ckpt/last.pt trainer.seed=7 batch=24
    trainer.resume: seed was 0 in the checkpoint and is 7; batch was 12 in the checkpoint and is 24;
    set this back, or accept it by 'trainer.accept=[seed,batch]'
trainer.resume=BASE/ckpt/last.pt recipe.width=8 trainer.run_dir=runs/new
    is a checkpoint of another model (names, shapes or dtypes of weights differ);
    set recipe.* and trainer.master_weights back
trainer.run_dir=runs/..
    trainer.run_dir=runs/..: has no name, and the folder of checkpoints needs one; give runs/NAME
trainer.run_dir=BASE/runs/r
    /runs/r: holds a run already; resume it with trainer.resume=auto, or give another
trainer.run_dir=runs/r trainer.checkpoint.dir=BASE/ckpt
    /ckpt/r holds checkpoints of a run of this name; resume with trainer.resume=auto, or give another trainer.run_dir
trainer.init_from=nowhere
    trainer.init_from=nowhere: no such checkpoint, .safetensors, .pt, .pth or .bin file, or Hugging Face folder; give
recipe=bert_tiny recipe.text=empty recipe.cache=cache
    recipe.text=empty: there is no text in it; give UTF-8 text, .jsonl or .parquet files
recipe=bert_tiny recipe.text=file recipe.cache=cache
    recipe.text=file: file is not UTF-8 text (byte 0); convert it, or move it elsewhere
"""


def parse(table: str) -> dict[str, list[str]]:
    cases: dict[str, list[str]] = {}
    for line in filter(None, table.splitlines()):
        if line.startswith(" "):
            cases[list(cases)[-1]].append(line.strip())
        else:
            cases[line] = []
    return cases


CASES = {**parse(WITHOUT_TORCH), **parse(WITH_TORCH)}
pytestmark = pytest.mark.timeout(300)  # the first test waits for all processes


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, tuple[Result, set[str]]]:
    """What each case ended with, and what it left in its folder. Two at a time."""
    base, stub = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("stub")
    (stub / "torch.py").write_text("raise SystemExit('torch was imported')")
    made = toy(["trainer.run_dir=runs/r", "trainer.max_steps=5"], base)
    assert made.code == 0, made.err
    shutil.copytree(base / "ckpt" / "r", base / "ckpt" / "damaged")
    weights = base / "ckpt" / "damaged" / "step-00000005" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}

    def one(typed: str) -> tuple[Result, set[str]]:
        cwd = tmp_path_factory.mktemp("case")
        (cwd / "file").write_bytes(b"\xff\x00\xfe")
        (cwd / "empty").mkdir()
        words = shlex.split(typed.replace("BASE", str(base)))
        env = dict(word.split("=") for word in words if word.partition("=")[0].isupper())
        path, loaded = (
            (f"{stub}{os.pathsep}{PYTHONPATH}", LIGHT) if typed in parse(WITHOUT_TORCH) else (PYTHONPATH, LOADED)
        )
        arguments = [word for word in words if word.partition("=")[0] not in env]
        result = run([*TOY, *QUICK, *arguments], cwd, loaded=loaded, PYTHONPATH=path, **env)
        return result, {str(path.relative_to(cwd)) for path in cwd.rglob("*")} - {"file", "empty"}

    with ThreadPoolExecutor(2) as pool:
        chosen = selected(request, "typed")
        ended = dict(zip(chosen, pool.map(one, chosen)))
    assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == before  # never written over
    return ended


@pytest.mark.parametrize("typed", one_of(3, CASES))
def test_one_line_says_it(results, typed):
    result, _ = results[typed]
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("echelon: ")
    assert [text for text in CASES[typed] if text not in result.err] == [], result.err
    assert "Traceback" not in result.err + result.out
    assert result.code in (71, 78)


@pytest.mark.parametrize("typed", one_of(3, CASES))
def test_nothing_is_started(results, typed):
    result, left = results[typed]
    if typed in parse(WITHOUT_TORCH):
        assert not left
        assert not result.out
    elif "recipe.width" not in typed and "optimizer.lr" not in typed:  # which must make a model to know
        assert not [path for path in left if path.startswith("runs/") or "step-" in path]
        assert "step 1/" not in result.out and "callbacks, in order" not in result.out


def test_each_kind_of_setting_is_tried():
    """The table above doesn't shrink unnoticed."""
    assert len(parse(WITHOUT_TORCH)) > 50 and len(parse(WITH_TORCH)) > 15


@pytest.mark.slow
def test_the_limit_of_a_files_size_is_one_line(tmp_path):
    """`ulimit -f`, in a user's shell or a batch system."""
    words = [*TOY, *QUICK, "trainer.max_steps=2", "trainer.run_dir=runs/r"]
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); import trainer.main as m; m.main()"
    )
    done = run(words, tmp_path, [sys.executable, "-c", code])
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert "File too large; the limit is 1024 bytes (ulimit -f); raise it" in done.err
