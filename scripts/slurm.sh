#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A run in as many jobs as it takes: sbatch --time=24:00:00 scripts/slurm.sh KEY=VALUE...
# 120 s before the time limit the ranks get USR1 and end with a checkpoint and code 75; the job then goes back into the
# queue, and on from there. Rank 0 writes the checkpoint, so srun must not kill it where others end before it.
# torchrun would end by USR1: with it, ask for TERM@120.
srun --kill-on-bad-exit=0 python -m trainer.main trainer.run_dir="runs/$SLURM_JOB_ID" trainer.resume=auto "$@"
code=$?
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
