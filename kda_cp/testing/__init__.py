"""What tests of the operator, and of models built on it, can use: ranks on one machine, and counts.

| module | offers |
|---|---|
| `ranks` | `RankPool`: gloo ranks in processes of their own, started once for a whole test run |
| `threads` | `run_threads`: many more ranks, as threads of one process |
| `collectives` | `count_collectives`: which collectives a block issues, and how much they carry |
| `wire` | `received_bytes`: what this process's TCP connections have really received |

Nothing in the operator imports this package. `ranks` needs cloudpickle (the `dev` extra).
"""
