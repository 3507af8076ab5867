#!/usr/bin/env bash
# What a GPU machine without a package index lacks: scripts/gpu_wheels.sh puts six packages into .gpu/, which git ignores.
# Their Python serves any version of it; torchao's compiled kernels are not used. Carry .gpu/ along;
# scripts/gpu_test finds them there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup recipes,test
cd "$root"
rm -rf .gpu
"$python" -m pip install -qq --no-deps --no-compile --target .gpu --constraint constraints.txt \
    antlr4-python3-runtime braceexpand hydra-core omegaconf torchao webdataset
