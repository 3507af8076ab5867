#!/usr/bin/env bash
# Before its time is over, the job saves a checkpoint, ends and queues itself again, until the run is done.
#   sbatch scripts/cluster/slurm.sh recipe=bert_large batch=256         options of sbatch go before the file
# Submit it where `python` has Echelon, from a folder that all nodes share: runs/ and ckpt/ come to lie there.
#SBATCH --job-name=echelon
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8        # one task a GPU
#SBATCH --cpus-per-task=4
##SBATCH --gpus-per-node=8         # where the cluster counts them: take one # away; each task must see all of them
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@180          # seconds before the end, up to a minute earlier: time for the last checkpoint
#SBATCH --requeue                  # also after a node has failed
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append         # one log for all of the job's starts

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun has not taken it from the job since SLURM 22.05

# Each rank binds itself to the cores of its GPU's NUMA node (trainer.affinity), which srun's own binding would prevent. A cluster
# without srun's binding refuses the option.
bind=()
scontrol show config | grep -q '^TaskPlugin .*affinity' && bind=(--cpu-bind=none)

srun --kill-on-bad-exit=1 "${bind[@]}" python -m trainer.main \
    trainer.run_dir="runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" trainer.resume=auto "$@"
code=$?
((code != 75)) || scontrol requeue "$SLURM_JOB_ID"  # 75: stopped by the signal, with a checkpoint
exit "$code"
