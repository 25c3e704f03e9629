# Install this repository into a virtual environment. Sourced by tests/run.sh and launch/quickstart.sh:
#
#     source launch/install.sh; install dev
#
# An active virtual environment is used as it is; otherwise .venv in the repository is made or reused.
# What is there already is left alone: a torch that works, with the triton it brought along.

# The release that the CPU tests run with, taken only where no torch is importable.
TORCH_WHERE_NONE="torch==2.13.0"
# The release that GPU runs are measured with; a CUDA build of torch brings its own.
TRITON_WHERE_NONE="triton==3.6.0"

say() { printf '==> %s\n' "$*"; }

# install EXTRA: afterwards `python` is the environment's, and imports kda_cp with that extra.
install() {
    local extra=$1 repository
    repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        if [ ! -x "$repository/.venv/bin/python" ]; then
            say "making a virtual environment in $repository/.venv"
            "${PYTHON:-python3}" -m venv "$repository/.venv"
        fi
        VIRTUAL_ENV=$repository/.venv
        export VIRTUAL_ENV
    fi
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    say "using $(python --version) of $VIRTUAL_ENV"

    if ! importable torch; then
        say "installing $TORCH_WHERE_NONE"
        quiet_pip "$TORCH_WHERE_NONE"
    fi
    if [ "$(uname -s)" = Linux ] && ! importable triton; then
        say "installing $TRITON_WHERE_NONE"
        quiet_pip "$TRITON_WHERE_NONE"
    fi
    # Pinned to what is installed: an extra's dependencies must not exchange it.
    local torch_found
    torch_found=$(python -c 'import importlib.metadata as m; print(m.version("torch"))')
    say "installing kda-cp[$extra] with torch $torch_found"
    quiet_pip "torch==$torch_found" --editable "$repository[$extra]"
}

importable() {
    python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"
}

quiet_pip() {
    python -m pip install --quiet --disable-pip-version-check "$@"
}
