# Sourced by quickstart.sh and test.sh: a virtual environment with ds_tsp in it, and the variables of a run.
# The environment is made once, and again when setup.py, pyproject.toml or constraints.txt change. You may set:
#   DS_TSP_PYTHON       the Python, 3.11 or newer, to make it with   (default: the first such on PATH)
#   DS_TSP_VENV         its folder                                   (default: .venv in the repository)
#   DS_TSP_TORCH_INDEX  the package index that has your torch build  (default: see ds_tsp_install_torch)
# shellcheck shell=bash

DS_TSP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DS_TSP_VENV=$(realpath -m "${DS_TSP_VENV:-$DS_TSP_ROOT/.venv}")
DS_TSP_TORCH=torch==2.13.0
DS_TSP_CPU_INDEX=https://download.pytorch.org/whl/cpu

ds_tsp_fail() {
    printf 'ds_tsp: %s\n' "$@" >&2
    exit 1
}

ds_tsp_has_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q GPU || rocm-smi --showid >/dev/null 2>&1
}

ds_tsp_find_python() {
    local candidate
    for candidate in ${DS_TSP_PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    ds_tsp_fail "needs Python 3.11 or newer: install it, or name it: DS_TSP_PYTHON=/path/to/python3.11"
}

# Without a GPU: the CPU build, from the user's own pip sources, else from torch's index, else what PyPI has (it runs too).
ds_tsp_install_torch() {
    local pip=("$DS_TSP_VENV/bin/python" -m pip install -qq --disable-pip-version-check -c "$DS_TSP_ROOT/constraints.txt")
    if [ -n "${DS_TSP_TORCH_INDEX:-}" ]; then
        "${pip[@]}" --extra-index-url "$DS_TSP_TORCH_INDEX" "$DS_TSP_TORCH"
    elif ! ds_tsp_has_gpu; then
        "${pip[@]}" "$DS_TSP_TORCH+cpu" 2>/dev/null ||
            "${pip[@]}" --retries 1 --extra-index-url "$DS_TSP_CPU_INDEX" "$DS_TSP_TORCH+cpu" 2>/dev/null ||
            "${pip[@]}" "$DS_TSP_TORCH"
    fi
}

# DeepSpeed compiles a small op the first time that ranks meet on a CPU: g++ and Python.h, and ninja from pip.
ds_tsp_need_compiler() {
    local headers
    headers=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    if command -v g++ >/dev/null && [ -e "$headers" ]; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y g++ python3-dev; } >/dev/null || true
    fi
    command -v g++ >/dev/null || ds_tsp_fail "needs g++, which DeepSpeed compiles a CPU op with: apt-get install g++"
    [ -e "$headers" ] || ds_tsp_fail "$headers is missing, DeepSpeed compiles a CPU op with it: apt-get install python3-dev"
}

ds_tsp_install() {
    local python
    python=$(ds_tsp_find_python) || exit 1
    ds_tsp_has_gpu || ds_tsp_need_compiler "$python"
    echo "ds_tsp: installing into $DS_TSP_VENV (once, some minutes)"
    rm -f "$DS_TSP_VENV/ds_tsp.stamp"
    "$python" -m venv --clear "$DS_TSP_VENV" ||
        ds_tsp_fail "$python cannot make a virtual environment: apt-get install python3-venv, or use another DS_TSP_PYTHON"
    ds_tsp_install_torch
    "$DS_TSP_VENV/bin/python" -m pip install -qq --disable-pip-version-check \
        -c "$DS_TSP_ROOT/constraints.txt" -e "$DS_TSP_ROOT[dev]" ||
        ds_tsp_fail "pip could not install ds_tsp and its requirements, see above"
}

ds_tsp_stamp() {
    cat "$DS_TSP_ROOT/setup.py" "$DS_TSP_ROOT/pyproject.toml" "$DS_TSP_ROOT/constraints.txt" | sha256sum
    echo "$DS_TSP_ROOT ${DS_TSP_TORCH_INDEX:-} $(ds_tsp_has_gpu && echo gpu || echo cpu)"
}

DS_TSP_WANT=$(ds_tsp_stamp)
DS_TSP_FRESH=
if [ "$(cat "$DS_TSP_VENV/ds_tsp.stamp" 2>/dev/null)" != "$DS_TSP_WANT" ] || ! "$DS_TSP_VENV/bin/python" -c '' 2>/dev/null; then
    ds_tsp_install
    DS_TSP_FRESH=1
fi
# shellcheck disable=SC1091
. "$DS_TSP_VENV/bin/activate" # also puts one ninja first on PATH: with another one DeepSpeed's op is compiled again

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$DS_TSP_VENV/torch_extensions}
# torch 2.13 renamed two collectives and warns on every rank.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning:torch.distributed.c10d_logger}
if ! ds_tsp_has_gpu; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # one machine, whose own name need not resolve
fi
if [ -n "$DS_TSP_FRESH" ]; then
    if [ "${DS_ACCELERATOR:-}" = cpu ]; then
        python -c 'from deepspeed.accelerator import get_accelerator as a; a().create_op_builder("ShareMemCommBuilder").load()' \
            >/dev/null || ds_tsp_fail "DeepSpeed's CPU op does not compile, see above"
    fi
    printf '%s\n' "$DS_TSP_WANT" >"$DS_TSP_VENV/ds_tsp.stamp"
fi
