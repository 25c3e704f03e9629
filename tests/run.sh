#!/usr/bin/env bash
# Install the package with what its tests need, then run every check: ruff, mypy, pytest.
#
#     ./tests/run.sh                     all but the slow tests
#     ./tests/run.sh -m ''               the slow ones as well
#     ./tests/run.sh tests/test_ranks.py -k dead      arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/install.sh
install dev

say "ruff check, ruff format --check"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest $*"
python -m pytest "$@"
