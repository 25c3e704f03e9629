"""Who may import whom, held by parsing every module.

`ROWS` is the table; a module without a row is an error, so a new file says where it belongs.
The standard library is open to everyone. Imports inside functions count like any other.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """What one module, or every module that matches a pattern, may import.

    Attributes:
        own: patterns of modules of this project, without the leading "kda_cp.".
        others: top-level packages of other projects.
        distributed: may import torch.distributed (and name its types).
        communicates: may call its collectives as well.
    """

    own: tuple[str, ...] = ()
    others: tuple[str, ...] = ("torch",)
    distributed: bool = False
    communicates: bool = False


# The first row that matches a module's name holds.
ROWS: Mapping[str, Row] = {
    # Folders. Kernels know tensors and never ranks; comm knows maps and integers and never kernels.
    "kernels.*": Row(own=("kernels", "kernels.*"), others=("torch", "triton")),
    "comm.layout": Row(others=()),
    "comm.plan": Row(own=("comm.layout",), others=()),
    "comm.traffic": Row(own=("comm.layout", "comm.plan"), others=()),
    "comm.affine": Row(),
    "comm.collectives": Row(own=("comm.*",), distributed=True, communicates=True),
    "comm.*": Row(own=("comm", "comm.*"), distributed=True),
    "launch.*": Row(
        own=("*",),
        others=(
            *("torch", "triton", "numpy", "rich", "matplotlib", "deepspeed"),
            *("fla", "attn_gym", "flash_kda"),
        ),
        distributed=True,
        communicates=True,
    ),
    "layers.*": Row(own=("", "*"), distributed=True),
    "testing.ranks": Row(others=("torch", "cloudpickle"), distributed=True, communicates=True),
    "testing*": Row(own=("*",), distributed=True, communicates=True),
    # An oracle that shares code with what it judges would share its faults.
    "reference": Row(),
    # From the ground up: each may import only what stands above it here.
    "platform": Row(),
    "gates": Row(),
    "segments": Row(own=("comm.plan",)),
    "stages": Row(own=("segments",)),
    "validation": Row(own=("stages",)),
    "eager": Row(own=("comm", "comm.affine", "gates", "segments", "stages", "platform")),
    "recurrent": Row(own=("gates", "segments", "stages", "platform")),
    "cuts": Row(own=("segments",)),
    "compiled": Row(
        own=("comm", "comm.affine", "cuts", "kernels.*", "segments", "stages"),
        others=("torch", "triton"),
    ),
    "context": Row(own=("comm.*", "platform", "segments"), distributed=True),
    "pipeline": Row(own=("comm.*", "segments", "stages", "platform")),
    "autograd": Row(own=("comm.exchange", "stages", "pipeline")),
    "parallel": Row(own=("autograd", "comm.*", "context", "validation")),
    "conv": Row(own=("comm.*", "context", "segments", "platform")),
    "resolve": Row(own=("validation", "context", "reference", "stages", "platform", "compiled")),
    "api": Row(
        own=(
            "validation",
            "context",
            "pipeline",
            "autograd",
            "eager",
            "compiled",
            "recurrent",
            "resolve",
            "gates",
            "segments",
            "stages",
            "platform",
        ),
    ),
    # The root only passes on public names.
    "": Row(own=("api", "context", "gates", "parallel", "conv", "layers"), others=()),
}

# Functions of torch.distributed that communicate or make groups; the rest are types and numbers.
COMMUNICATION = (
    "all_gather*",
    "all_to_all*",
    "all_reduce*",
    "reduce*",
    "broadcast*",
    "scatter*",
    "gather*",
    "*send*",
    "*recv*",
    "*barrier*",
    "new_group*",
    "new_subgroups*",
    "init_process_group",
    "init_device_mesh",
    "_functional_collectives.*",
)

# Questions about the machine that only platform.py asks.
PLATFORM_QUESTIONS = (
    "torch.cuda.is_available",
    "torch.cuda.get_device_capability",
    "torch.cuda.get_device_name",
    "torch.cuda.get_device_properties",
    "torch.version.cuda",
    "torch.version.hip",
    "torch.xpu.is_available",
)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def row_of(module: str) -> Row | None:
    """The row of a module, named without the leading "kda_cp."; None where it has none."""
    for pattern, row in ROWS.items():
        if fnmatchcase(module, pattern):
            return row
    return None


@dataclass(frozen=True)
class Use:
    """An imported module or a dotted name that is read, with its line."""

    name: str
    line: int


def imported_and_read(source: str, module: str) -> tuple[list[Use], list[Use]]:
    """(imports, dotted names read) of a module's source, local aliases resolved.

    `from a import b` counts as an import of `a.b`: b may be a module; the caller resolves it.
    """
    tree = ast.parse(source)
    imports: list[Use] = []
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                imports.append(Use(name.name, node.lineno))
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            for name in node.names:
                imports.append(Use(f"{base}.{name.name}", node.lineno))
                aliases[name.asname or name.name] = f"{base}.{name.name}"
    read = []
    for node in ast.walk(tree):
        dotted, inner = [], node
        while isinstance(inner, ast.Attribute):
            dotted.append(inner.attr)
            inner = inner.value
        if dotted and isinstance(inner, ast.Name) and inner.id in aliases:
            read.append(Use(".".join([aliases[inner.id], *reversed(dotted)]), node.lineno))
    return imports, read


def all_modules() -> dict[str, pathlib.Path]:
    """Dotted name without the leading "kda_cp." -> file, for every module of the project."""
    package = REPOSITORY / "kda_cp"
    folders = [package, *(package / link for link in ("kernels", "comm", "launch"))]
    modules = {}
    for folder in folders:
        # rglob does not follow the links, which is why each is a start of its own.
        for path in folder.rglob("*.py"):
            parts = path.relative_to(package).with_suffix("").parts
            modules[".".join(part for part in parts if part != "__init__")] = path
    return modules


def faults_of(module: str, source: str, modules: Mapping[str, object]) -> Iterator[str]:
    """Describe every import or use in `source` that the row of `module` forbids."""
    row = row_of(module)
    if row is None:
        yield f"{module} has no row in ROWS"
        return
    imports, read = imported_and_read(source, f"kda_cp.{module}")

    for use in imports:
        top = use.name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        where = f"{module or 'kda_cp/__init__'}:{use.line} imports {use.name}"
        if top == "kda_cp":
            target = use.name.removeprefix("kda_cp").removeprefix(".")
            # `from kda_cp.a import f` imports module a; `from kda_cp import a` the same one.
            while target and target not in modules and target not in {"kernels", "comm", "launch"}:
                target = target.rpartition(".")[0]
            if not matches(target, row.own):
                yield f"{where}, which is not among {row.own}"
        elif top not in row.others:
            yield f"{where}, which is not among {row.others}"

    for use in [*imports, *read]:
        where = f"{module or 'kda_cp/__init__'}:{use.line} uses {use.name}"
        if matches(use.name, ("torch.distributed", "torch.distributed.*")):
            if not row.distributed:
                yield f"{where}, but knows nothing of ranks"
            function = use.name.removeprefix("torch.distributed").removeprefix(".")
            function = function.removeprefix("distributed_c10d.")
            if matches(function, COMMUNICATION) and not row.communicates:
                yield f"{where}, but only comm/collectives.py communicates"
        if use.name in PLATFORM_QUESTIONS and module != "platform":
            yield f"{where}: ask kda_cp.platform"


def test_every_module_keeps_to_its_row() -> None:
    modules = all_modules()
    assert {"", "platform", "testing.ranks"} <= set(modules), "the modules were not found"
    faults = [
        fault
        for module, path in modules.items()
        for fault in faults_of(module, path.read_text(), modules)
    ]
    assert not faults, "\n".join(faults)


def test_no_test_asks_torch_about_the_platform() -> None:
    faults = []
    for path in (REPOSITORY / "tests").rglob("*.py"):
        imports, read = imported_and_read(path.read_text(), "tests")
        faults += [
            f"{path.name}:{use.line} uses {use.name}: ask kda_cp.platform"
            for use in [*imports, *read]
            if use.name in PLATFORM_QUESTIONS
        ]
    assert not faults, "\n".join(faults)


def test_imports_run_one_way() -> None:
    # A circle of modules is one module; the rows alone would allow circles inside comm or kernels.
    modules = all_modules()
    imports_of = {}
    for module, path in modules.items():
        targets = set()
        for use in imported_and_read(path.read_text(), f"kda_cp.{module}")[0]:
            name = use.name.removeprefix("kda_cp.")
            if use.name.startswith("kda_cp."):
                targets |= {name, name.rpartition(".")[0]} & set(modules) - {"", module}
        imports_of[module] = targets
    while leaves := {module for module, targets in imports_of.items() if not targets}:
        imports_of = {m: targets - leaves for m, targets in imports_of.items() if m not in leaves}
    assert not imports_of, f"these import each other in a circle: {sorted(imports_of)}"


def test_the_bare_folder_names_are_imported_nowhere() -> None:
    # `kernels`, `comm` and `launch` are other projects' packages wherever those are installed.
    for path in [*all_modules().values(), *(REPOSITORY / "tests").rglob("*.py")]:
        imports, _ = imported_and_read(path.read_text(), "x")
        bare = {use.name for use in imports} & {"kernels", "comm", "launch"}
        tops = {use.name.partition(".")[0] for use in imports} & {"kernels", "comm", "launch"}
        assert not bare | tops, f"{path}: {bare | tops}"


# (module, source, what the fault says); every rule is broken once.
FORBIDDEN = [
    ("kernels.intra", "import torch.distributed as dist", "knows nothing of ranks"),
    ("kernels.intra", "import torch\nx = torch.distributed.get_rank()", "knows nothing of ranks"),
    ("kernels.intra", "from kda_cp.comm import plan", "imports kda_cp.comm.plan"),
    ("kernels.intra", "from kda_cp import pipeline", "imports kda_cp.pipeline"),
    ("kernels.intra", "from ..comm.plan import Plan", "imports kda_cp.comm.plan.Plan"),
    ("kernels.intra", "import numpy", "imports numpy"),
    ("comm.exchange", "import triton", "imports triton"),
    ("comm.exchange", "def f():\n    import triton.language as tl", "imports triton.language"),
    ("comm.exchange", "from kda_cp.context import CPContext", "imports kda_cp.context"),
    ("comm.exchange", "from kda_cp.kernels.state import run", "imports kda_cp.kernels"),
    (
        "comm.exchange",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "only comm/collectives.py communicates",
    ),
    ("comm.plan", "import torch", "imports torch"),
    ("reference", "from kda_cp.gates import sigmoid", "imports kda_cp.gates"),
    ("reference", "from kda_cp import gates", "imports kda_cp.gates"),
    ("reference", "import triton", "imports triton"),
    ("api", "import torch.distributed", "knows nothing of ranks"),
    ("api", "from kda_cp.comm.plan import Plan", "imports kda_cp.comm.plan"),
    (
        "context",
        "from torch.distributed import all_reduce",
        "only comm/collectives.py communicates",
    ),
    ("gates", "from kda_cp.api import chunk_kda", "imports kda_cp.api"),
    ("eager", "import matplotlib.pyplot", "imports matplotlib.pyplot"),
    ("eager", "import torch\nif torch.cuda.is_available(): pass", "ask kda_cp.platform"),
    ("eager", "from torch import cuda\ncuda.get_device_capability()", "ask kda_cp.platform"),
    ("eager", "from torch.version import hip", "ask kda_cp.platform"),
    ("launch.bench", "import torch\ntorch.cuda.get_device_name()", "ask kda_cp.platform"),
    ("newcomer", "", "has no row"),
    ("", "import torch", "imports torch"),
]


@pytest.mark.parametrize(("module", "source", "fault"), FORBIDDEN)
def test_a_forbidden_import_is_caught(module: str, source: str, fault: str) -> None:
    modules = {**all_modules(), "kernels.state": None}
    found = list(faults_of(module, source, modules))
    assert any(fault in text for text in found), found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.intra", "import triton\nimport torch\nfrom kda_cp.kernels.state import f"),
        ("kernels.intra", "from .state import f"),
        ("comm.exchange", "from kda_cp.comm import plan\nfrom kda_cp.comm.plan import Plan"),
        ("comm.collectives", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("platform", "import torch\ntorch.cuda.is_available()"),
        ("launch.bench", "from kda_cp import chunk_kda\nimport torch.distributed as dist"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    modules = {**all_modules(), "kernels.state": None}
    assert list(faults_of(module, source, modules)) == []
