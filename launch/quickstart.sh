#!/usr/bin/env bash
# Install the package, then run the main job: the operator on real documents, sharded over ranks and on
# one rank, against a judge in float64. On all GPUs where torch sees some, else on 4 CPU ranks.
#
#     ./launch/quickstart.sh             arguments go to kda_cp.launch.verify
#     RANKS=2 ./launch/quickstart.sh     another number of ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${RANKS:-}" ] && ! [[ $RANKS =~ ^0*[1-9][0-9]*$ ]]; then
    echo "RANKS: expected an integer of at least 1, got '$RANKS'" >&2
    exit 2
fi

source launch/install.sh
install launch

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
    ranks=${RANKS:-$gpus}
    say "running on $ranks of $gpus GPUs"
else
    ranks=${RANKS:-4}
    # The ranks are the parallelism here; threads of one rank would only take cores from the others.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    say "no GPU: running on $ranks CPU ranks"
fi
job=(torchrun --standalone --nproc-per-node "$ranks" -m kda_cp.launch.verify "$@")
say "${job[*]}"
exec "${job[@]}"
