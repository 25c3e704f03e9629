"""`kda_cp.platform`: the answers for each kind of machine; `exact_products` leaves no trace."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator

import pytest
import torch

from kda_cp import platform

# name -> (cuda there?, torch.version.hip, compute capability, xpu there?)
MACHINES = {
    "cpu": (False, None, None, False),
    "ampere": (True, None, (8, 0), False),
    "hopper": (True, None, (9, 0), False),
    "blackwell": (True, None, (10, 0), False),
    "blackwell_workstation": (True, None, (12, 0), False),
    "mi300": (True, "6.4", (9, 4), False),
    "intel": (False, None, None, True),
}
FLAGS = ("IS_NVIDIA", "IS_NVIDIA_HOPPER", "IS_NVIDIA_BLACKWELL", "IS_AMD", "IS_INTEL")
EXPECTED = {
    "cpu": ("cpu", "cpu", set()),
    "ampere": ("cuda", "nvidia", {"IS_NVIDIA"}),
    "hopper": ("cuda", "nvidia", {"IS_NVIDIA", "IS_NVIDIA_HOPPER"}),
    "blackwell": ("cuda", "nvidia", {"IS_NVIDIA", "IS_NVIDIA_BLACKWELL"}),
    "blackwell_workstation": ("cuda", "nvidia", {"IS_NVIDIA", "IS_NVIDIA_BLACKWELL"}),
    # 9.4 is a compute capability as well, but not an NVIDIA one.
    "mi300": ("cuda", "amd", {"IS_AMD"}),
    "intel": ("xpu", "intel", {"IS_INTEL"}),
}


@pytest.fixture(autouse=True)
def forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test ask anew, and the tests of other files keep the true answers."""
    monkeypatch.setattr(platform, "_answers", {})


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    cuda, hip, capability, xpu = MACHINES[machine]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)


@pytest.mark.parametrize("machine", MACHINES)
def test_answers_for_each_machine(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    pretend(monkeypatch, machine)
    device, device_platform, true_flags = EXPECTED[machine]
    assert platform.device == device
    assert platform.device_platform == device_platform
    assert {flag for flag in FLAGS if getattr(platform, flag) is True} == true_flags
    assert {flag for flag in FLAGS if getattr(platform, flag) is False} == {*FLAGS} - true_flags


def test_each_question_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "hopper")
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append("available") or True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: asked.append("capability") or (9, 0),
    )
    for _ in range(3):
        assert platform.device == "cuda"
        assert platform.IS_NVIDIA_HOPPER
    assert sorted(asked) == ["available", "capability"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="IS_NVIDEA"):
        _ = platform.IS_NVIDEA


def test_dir_lists_every_question() -> None:
    assert {*FLAGS, "device", "device_platform", "exact_products"} <= set(dir(platform))


# Runs in a process of its own, where nothing was asked or started before.
FORBID_CUDA = """
    import warnings
    warnings.simplefilter("error")
    import torch

    def forbidden(*args, **kwargs):
        raise AssertionError("asked the driver")

    for module in (torch.cuda, torch.xpu):
        for name in ("is_available", "device_count", "_lazy_init", "get_device_capability"):
            if hasattr(module, name):
                setattr(module, name, forbidden)
"""


def test_import_and_exact_products_ask_no_driver(run_fresh) -> None:
    run_fresh(
        FORBID_CUDA,
        """
        from kda_cp import platform
        dir(platform)
        for device_type in ("cpu", "cuda", "xpu", "meta"):
            with platform.exact_products(device_type):
                pass
        try:
            platform.device
        except AssertionError as error:  # the guard above works
            assert "asked the driver" in str(error)
        else:
            raise SystemExit("the guard saw nothing")
        """,
    )


# The ways a user asks for inexact fp32 products; the last ones are combinations.
REQUESTS = {
    "nothing": "",
    "highest": "torch.set_float32_matmul_precision('highest')",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "cuda_tf32": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "mkldnn_tf32": "torch.backends.mkldnn.matmul.fp32_precision = 'tf32'",
    "mkldnn_bf16": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "everything_tf32": "torch.backends.fp32_precision = 'tf32'",
    "exact_child": (
        "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'"
    ),
    "medium_autocast": (
        "torch.set_float32_matmul_precision('medium')\n"
        "autocast = torch.autocast('cpu', torch.bfloat16); autocast.__enter__()"
    ),
}

SNAPSHOT = """
    import warnings
    warnings.simplefilter("error")
    import torch
    from kda_cp.platform import exact_products

    def read(getter):
        try:
            return getter()
        except RuntimeError as error:  # torch refuses to mix its two interfaces
            return "refused: " + str(error)[:60]

    def settings():
        b = torch.backends
        return {
            "precision": read(torch.get_float32_matmul_precision),
            "allow_tf32": read(lambda: b.cuda.matmul.allow_tf32),
            "all": read(lambda: b.fp32_precision),
            "cuda": read(lambda: b.cuda.matmul.fp32_precision),
            "cudnn": read(lambda: b.cudnn.conv.fp32_precision),
            "mkldnn": read(lambda: b.mkldnn.matmul.fp32_precision),
            "mkldnn conv": read(lambda: b.mkldnn.conv.fp32_precision),
            "autocast": torch.is_autocast_enabled("cpu"),
        }

    torch.manual_seed(0)
    a = torch.randn(64, 64)
    exact = a @ a
"""

CHECK = """
    before = settings()

    def inside():
        assert torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
        assert torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
        product = a @ a
        assert product.dtype is torch.float32, product.dtype
        assert torch.equal(product, exact)

    with exact_products("cpu"):
        inside()
        with exact_products("cpu"):
            inside()
        inside()  # the inner one restored nothing
    assert settings() == before, (before, settings())

    try:
        with exact_products("cpu"):
            raise KeyError("user")
    except KeyError:
        pass
    assert settings() == before, (before, settings())
"""

FOLLOWS = """
    # A setting that followed torch.backends.fp32_precision still follows it.
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
"""


def test_exact_products_restores_every_setting(run_fresh) -> None:
    # A process for each request, as torch has no way back from some of them; forked from one that
    # has imported torch already.
    run_fresh(
        SNAPSHOT,
        """
        import os, sys, traceback

        def in_a_child(name, code):
            child = os.fork()
            if child == 0:
                try:
                    exec(code, globals())
                except BaseException:
                    print(name, traceback.format_exc(), file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            return os.waitpid(child, 0)[1] == 0
        """,
        f"""
        requests = {REQUESTS!r}
        check, follows = {textwrap.dedent(CHECK)!r}, {textwrap.dedent(FOLLOWS)!r}
        """,
        """
        cases = {name: [request, check] for name, request in requests.items()}
        cases["follows"] = [requests["everything_tf32"], check, follows]
        failed = [name for name, code in cases.items() if not in_a_child(name, chr(10).join(code))]
        assert not failed, failed
        """,
    )


@pytest.fixture
def bf16_products() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul
    found = setting.fp32_precision
    setting.fp32_precision = "bf16"
    yield
    setting.fp32_precision = found


@pytest.mark.usefixtures("bf16_products")
def test_two_threads_may_overlap() -> None:
    # Another thread enters while this one is inside and leaves after it: exact to its end.
    other_is_inside, may_look = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with platform.exact_products("cpu"):
            other_is_inside.set()
            may_look.wait(30)
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)

    thread = threading.Thread(target=other)
    with platform.exact_products("cpu"):
        thread.start()
        assert other_is_inside.wait(30)
    may_look.set()
    thread.join()
    assert seen == ["ieee"]
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.gpu
@pytest.mark.skipif(platform.device != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("request_name", ["high", "allow_tf32", "cuda_tf32", "everything_tf32"])
def test_exact_products_on_a_gpu(request_name: str, run_fresh) -> None:
    run_fresh(
        "import torch",
        REQUESTS[request_name],
        """
        from kda_cp.platform import exact_products
        torch.manual_seed(0)
        a = torch.randn(512, 512, device="cuda")
        expected = a.double() @ a.double()
        def error(product):
            return ((product.double() - expected).norm() / expected.norm()).item()
        assert error(a @ a) > 1e-5, "the request had no effect"
        with torch.autocast("cuda", torch.bfloat16), exact_products("cuda"):
            for product in (a @ a, torch.bmm(a[None], a[None])[0], torch.addmm(a, a, a) - a,
                            torch.nn.functional.linear(a, a.T, a[0]) - a[0],
                            torch.einsum("ij,jk->ik", a, a)):
                assert error(product) < 1e-6, error(product)
        assert error(a @ a) > 1e-5, "not restored"
        """,
    )
