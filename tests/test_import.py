"""`import kda_cp` in a fresh process: what it needs, and what it leaves alone."""

from __future__ import annotations

# Makes importing the named packages fail, as if they were not installed.
BLOCKER = """
    import sys
    import warnings

    warnings.simplefilter("error")

    class Blocker:
        def __init__(self, *packages):
            self.packages = packages

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in self.packages:
                raise ModuleNotFoundError(f"{name} is blocked", name=name)
            return None

    def block(*packages):
        loaded = [name for name in sys.modules if name.partition(".")[0] in packages]
        assert not loaded, loaded
        sys.meta_path.insert(0, Blocker(*packages))
"""


def test_the_operator_imports_without_what_it_does_not_need(run_fresh) -> None:
    run_fresh(
        BLOCKER,
        """
        block("triton", "rich", "matplotlib", "cloudpickle", "fla")
        import kda_cp
        """,
    )


def test_the_operator_runs_without_triton(run_fresh) -> None:
    run_fresh(
        BLOCKER,
        """
        block("triton", "rich", "matplotlib", "cloudpickle", "fla")
        import torch
        import kda_cp

        q, k, v, g = (torch.randn(1, 70, 2, 16).requires_grad_() for _ in range(4))
        beta = torch.rand(1, 70, 2)
        for impl in ("torch", "auto", "reference"):
            o, _ = kda_cp.chunk_kda(
                q, k, v, -g.exp(), beta, use_qk_l2norm_in_kernel=True, impl=impl
            )
            o.sum().backward()
        o, _ = kda_cp.fused_recurrent_kda(q, k, v, -g.exp(), beta, impl="torch")
        assert "triton" not in sys.modules
        """,
    )


def test_the_blocker_blocks(run_fresh) -> None:
    run_fresh(
        BLOCKER,
        """
        block("triton", "rich")
        for statement in ("import triton", "import triton.language as tl", "import rich.table"):
            try:
                exec(statement)
            except ModuleNotFoundError as error:
                assert "is blocked" in str(error), error
            else:
                raise SystemExit(f"{statement} went through")
        """,
    )


def test_import_loads_nothing_extra_and_starts_nothing(run_fresh) -> None:
    run_fresh(
        BLOCKER,
        """
        import threading
        import torch

        def forbidden(*args, **kwargs):
            raise AssertionError("asked the driver")

        for module in (torch.cuda, torch.xpu):
            for name in ("is_available", "device_count", "_lazy_init", "get_device_capability"):
                if hasattr(module, name):
                    setattr(module, name, forbidden)

        before = set(sys.modules)
        threads = threading.active_count()
        settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
        rng = torch.random.get_rng_state()

        import kda_cp

        # torch may have loaded some of these by itself: only what is new counts.
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        unwanted = {"triton", "rich", "matplotlib", "cloudpickle", "fla"}
        unwanted |= {"kernels", "comm", "launch"}  # the bare names of the linked folders
        assert not new & unwanted, new & unwanted
        inside = {name for name in sys.modules if name.startswith("kda_cp.")}
        heavy = ("kda_cp.kernels.", "kda_cp.launch", "kda_cp.testing")
        assert not {name for name in inside if name.startswith(heavy)}, inside

        import torch.distributed as dist
        assert not dist.is_initialized()
        assert threading.active_count() == threads
        assert settings == (torch.get_num_threads(), torch.get_float32_matmul_precision())
        assert torch.equal(rng, torch.random.get_rng_state())
        """,
    )
