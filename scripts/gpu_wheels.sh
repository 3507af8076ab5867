#!/usr/bin/env bash
# What a GPU machine without a package index lacks: scripts/gpu_wheels.sh puts packages into .gpu/, which git ignores.
# None is built for one version of Python, so one folder serves any version of it, on Linux and x86-64. Carry .gpu/
# along: scripts/gpu_test and scripts/bench/gpu.py find it there. The machine has torch, numpy, transformers and tensorboard.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup recipes,test
cd "$root"
rm -rf .gpu
packages=(
    antlr4-python3-runtime braceexpand hydra-core omegaconf rich markdown-it-py mdurl pygments webdataset  # the trainer
    nvidia-ml-py                                                                      # gpu_monitor and the doctor
    execnet iniconfig pluggy pytest pytest-timeout pytest-xdist                                             # the tests
    accelerate lightning lightning-utilities pytorch-lightning torchmetrics                                 # the bench
    bitsandbytes torchao                                                # the latter's compiled kernels are not used
)
for package in "${packages[@]}"; do
    grep -q "^$package==" constraints.txt || echo "${0##*/}: $package is not in constraints.txt, and is left out" >&2
done
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | grep -Fxf <(sed 's/==.*//' constraints.txt))
"$python" -m pip install -qq --no-deps --no-compile --target .gpu --constraint constraints.txt "${packages[@]}"
# bitsandbytes has libraries of 120 MB for every CUDA; torch's own wheels have CUDA 13 since 2.11.
find .gpu/bitsandbytes -name 'libbitsandbytes_*.so' ! -name '*_cpu.so' ! -name '*_cuda13*.so' -delete
du -sh .gpu >&2
