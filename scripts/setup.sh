# Sourced by train and test. `setup EXTRAS` installs the project, once, into .venv of the checkout, or into the
# environment that ECHELON_ENV names, and sets $root (the checkout) and $python. A stamp there makes the next call cost
# nothing. An active environment is left alone: it may be another project's.

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

setup() {
    local extras=$1 env inputs
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    env=${ECHELON_ENV:-$root/.venv}
    [[ -d $env || $env == "$root/.venv" ]] || fail "ECHELON_ENV=$env: is no environment; make it by python3 -m venv $env"
    python=$env/bin/python
    inputs="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
    stamped "$env" "$inputs" "$extras" && return
    exec 9<"$root"
    command -v flock >/dev/null && flock 9  # another call may be installing right now
    if ! stamped "$env" "$inputs" "$extras"; then
        echo "${0##*/}: installing into $env (once, a few minutes)" >&2
        install "$env" "$extras"
        echo "$inputs $extras" >"$env/echelon.stamp"
    fi
    exec 9<&-
}

# The extras of train are the beginning of those of test, so one stamp serves both.
stamped() {
    [[ -f $1/echelon.stamp && $(<"$1/echelon.stamp") == "$2 $3"* ]]
}

install() {
    local env=$1 extras=$2 base torch pins
    if ! "$python" -m pip --version &>/dev/null; then
        [[ $env == "$root/.venv" ]] || fail "ECHELON_ENV=$env: has no pip; run '$python -m ensurepip'"
        base=$(find_python) || exit 1
        "$base" -m venv "$env" || fail "$base could not make the environment $env"
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or newer is needed; $python is older"
    torch=$(choose_torch "$env") || exit 1
    pins=$(mktemp)
    sed "s/^torch==.*/torch==$torch/" "$root/constraints.txt" >"$pins"
    # Through the environment, in the names that older and newer pip know, the pins hold for what builds the project too.
    (cd "$root" && PIP_CONSTRAINT=$pins PIP_BUILD_CONSTRAINT=$pins "$python" -m pip install -qq -e ".[$extras]") ||
        { rm -f "$pins"; fail "pip could not install the project into $env; its errors are above"; }
    rm -f "$pins"
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.10 or newer with venv and pip found; install one (Debian: apt-get install python3-venv) or name an environment by ECHELON_ENV"
}

# Prints the version of torch to hold pip to: the one that a user's own environment has, else the tested one; without an
# NVIDIA GPU its CPU build, which is a tenth of the size of the CUDA build.
choose_torch() {
    local env=$1 torch
    if [[ $env != "$root/.venv" ]] && "$python" -c 'import torch; print(torch.__version__)' 2>/dev/null; then
        return
    fi
    torch=$(sed -n 's/^torch==//p' "$root/constraints.txt")
    if [[ $(uname) == Linux ]] && ! compgen -G '/dev/nvidia*' >/dev/null && ! command -v nvidia-smi >/dev/null; then
        torch=$torch+cpu
        "$python" -m pip install -qq --no-deps "torch==$torch" >&2 ||
            fail "no NVIDIA GPU here, and pip's sources don't have torch $torch: call this once more with" \
                "PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> before it, or ECHELON_ENV=<an environment that has torch>"
    fi
    echo "$torch"
}
