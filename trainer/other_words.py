"""Other trainers' names for our settings, such as Lightning's and DeepSpeed's, for hints in error messages."""

from typing import Any

PRECISIONS = "trainer.precision=bf16 or trainer.precision=fp16"
SHARDS = "'+callbacks=[shard]'; without it, ranks train with DDP"
STARTED = "leave it out: torchrun and Slurm set it, and trainer.devices=N starts N ranks"
MINUTES = "leave it out: Echelon checkpoints and exits with 75 when the scheduler sends SIGTERM or SIGUSR1"

# Ours -> the words of others, without `_` and `-`.
OURS = {
    "trainer.precision=fp16": "fp16 half usefp16",
    "trainer.precision=bf16": "bf16 bfloat16 usebf16",
    "trainer.precision=tf32": "tf32 allowtf32",
    PRECISIONS: "amp useamp mixedprecision dtype autocast fp16backend",
    "trainer.devices=N": "gpus gpu numgpus ngpus ngpu gpuids numprocesses nprocpernode worldsize numdevices",
    "trainer.nodes=N": "numnodes nnodes nummachines",
    "trainer.accelerator=cuda": "usegpu usecuda cuda device",
    "trainer.accelerator=cpu": "nocuda usecpu",
    SHARDS: "strategy fsdp fsdpconfig deepspeed zero zerostage zerooptimization distributedbackend parallelismconfig",
    "trainer.backend": "ddpbackend distbackend processgroupbackend",
    "trainer.timeout_s": "ddptimeout disttimeout initprocessgrouptimeout",
    "accumulate=N": "accumulate accumulategradbatches gradientaccumulationsteps gradientaccumulation gradientaccum "
    "gradaccum gradaccumsteps accumulationsteps accumgrad gradaccumulationsteps",
    "batch=N, the samples of a step over all ranks": "batchsize trainbatchsize globalbatchsize perdevicetrainbatchsize "
    "totalbatchsize",
    "micro_batch=N": "microbatchsize devicetrainmicrobatchsize trainmicrobatchsizepergpu localbatchsize",
    "trainer.ddp.bucket_mib": "ddpbucket bucketcapmb ddpbucketcapmb bucketsize reducebucketsize bucketmb",
    "trainer.ddp.find_unused_parameters": "findunusedparameters ddpfindunusedparameters",
    STARTED: "localrank rank noderank masteraddr masterport",
    MINUTES: "maxtime timelimit maxtrainingtime",
    "trainer.dry_run=true": "fastdevrun",
    "trainer.overfit=N": "overfitbatches",
    "trainer.limit_batches.train=N": "limittrainbatches trainsubsetnumbatches",
    "trainer.limit_batches.validation=N": "limitvalbatches limitevalbatches evalsubsetnumbatches",
    "trainer.validate_every='N steps' or '1 epochs'": "valcheckinterval checkvaleverynepoch evalsteps evalinterval "
    "evalstrategy evaluationstrategy evalevery valinterval",
    "trainer.log_every_steps=N": "logeverynsteps loggingsteps loginterval logfreq",
    "trainer.clip_norm": "gradientclipval gradclip maxgradnorm clipgrad clipgradnorm gradientclipping maxnorm",
    "trainer.clip_value": "gradientclipalgorithm clipgradvalue",
    "trainer.checkpoint.every_steps=N": "savesteps saveinterval saveevery checkpointinterval everyntrainsteps",
    "trainer.checkpoint.keep=N": "savetopk savetotallimit savenumcheckpointstokeep keeplatestk",
    "trainer.checkpoint.keep_best": "monitor loadbestmodelatend metricforbestmodel",
    "trainer.checkpoint.dir": "savefolder checkpointdir ckptdir savedir",
    "trainer.run_dir": "defaultrootdir outputdir outdir logdir loggingdir dumpfolder workdir",
    "trainer.resume": "ckptpath resumefromcheckpoint loadpath resumefrom autoresume loadcheckpoint",
    "trainer.init_from": "loadweights pretrainedmodelpath initialloadpath",
    "trainer.max_epochs=N": "epochs numepochs numtrainepochs maxduration nepochs",
    "trainer.max_steps=N": "steps numsteps totalsteps maxiters trainingsteps numtrainingsteps iterations",
    "trainer.sync_batch_norm=true": "syncbatchnorm syncbn",
    "trainer.seed": "randomseed seedeverything",
    "optimizer.lr": "learningrate baselr",
    "schedule.warmup": "warmupsteps warmupratio lrwarmupsteps numwarmupsteps",
    "schedule=NAME": "lrscheduler lrschedulertype scheduler",
    "optimizer=NAME": "optim optimizertype",
    "data.workers=N": "numworkers dataloadernumworkers nworkers",
    "data.prefetch=N": "prefetchfactor dataloaderprefetchfactor",
    "'+callbacks=[compile]'": "compile torchcompile compilemodel usecompile",
    "'+callbacks=[activation_checkpoint]'": "gradientcheckpointing activationcheckpointing activationcheckpoint",
    "'+callbacks=[auto_batch]'": "autoscalebatchsize autofindbatchsize",
    "'+callbacks=[reduce_lr_on_plateau]'": "reducelronplateau reducelr reduceonplateau plateau",
    "'+callbacks=[early_stop]'": "earlystopping earlystoppingpatience patience",
    "'+callbacks=[nan_guard]'": "detectanomaly terminateonnan",
    "'+callbacks=[wandb]' or '+callbacks=[mlflow]'": "logger reportto trackers",
    "'+callbacks=[profiler]'": "profile useprofiler nsys",
    "'+callbacks=[local_sgd]'": "localsgdsteps communicationinterval",
    "'~callbacks.progress'": "enableprogressbar disabletqdm",
    "leave it out: batches are pinned on a GPU": "pinmemory dataloaderpinmemory",
    "leave it out: ranks read different samples": "usedistributedsampler replacesamplerddp",
}
WORDS = {word: ours for ours, words in OURS.items() for word in words.split()}

VALUES = {
    "trainer.precision": {
        "16": "fp16", "16-mixed": "fp16", "16-true": "fp16", "half": "fp16", "float16": "fp16", "fp16-mixed": "fp16",
        "amp_fp16": "fp16", "bf16-mixed": "bf16", "bfloat16": "bf16", "amp_bf16": "bf16", "bf16-true": "bf16_params",
        "32": "fp32", "32-true": "fp32", "float32": "fp32", "no": "fp32", "full": "fp32", "high": "tf32",
        "transformer-engine": "fp8",
    },
    "trainer.accelerator": {"gpu": "cuda", "gpus": "cuda"},
}  # fmt: skip


# Keys of earlier versions -> their names today.
RENAMED = {
    "data.lanes": "data.shuffle_shards",
    "data.block": "data.shuffle_window",
    "callbacks.bucket.late": "callbacks.bucket.delayed",
}


def plain(word: str) -> str:
    """Normalise a word to its spelling in the tables."""
    return word.replace("_", "").replace("-", "").lower()


MEANINGS = {key: {plain(word): ours for word, ours in words.items()} for key, words in VALUES.items()}


def new_name(key: str) -> str:
    """Return the fix for a key that an earlier version had; empty for any other."""
    return f"it is now {new}" if (new := RENAMED.get(key)) else ""


def now_compared(key: str) -> str:
    """Return today's name for what a resume compares: `lanes` is `shuffle_shards`."""
    return RENAMED.get(f"data.{key}", key).removeprefix("data.")


def our_key(key: str) -> str:
    """Return the Echelon setting for another trainer's key; empty if none is known."""
    ours = WORDS.get(plain(key.rpartition(".")[2]), "")
    return ours if ours.startswith("leave") else ours and f"here it is {ours}"


def our_value(key: str, value: Any) -> str:
    """Return the Echelon setting for another trainer's value; empty if none is known."""
    ours = MEANINGS.get(key, {}).get(plain(str(value)), "")
    return f"{key}={ours}" if ours else ""
