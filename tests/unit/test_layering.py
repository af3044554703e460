"""Arrows point down only: reads the imports of every module of ds_tsp and checks them against the table below."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "ds_tsp"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

# Low to high. A module imports from strictly lower levels only; a package such as kernels counts as one module here,
# and may import within itself as long as there is no cycle.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"config", "documents", "layout", "masters", "meter", "parts", "tag"}),
    frozenset({"mesh", "kernels"}),
    frozenset({"comm", "universal"}),
    frozenset({"convert", "embedding", "grad_sync", "materialise", "recompute", "schedules", "transports"}),
    frozenset({"attention", "vocab"}),
    frozenset({"data", "terms"}),
    frozenset({"fold", "microbatches"}),
    frozenset({"blocks", "checkpoint", "loader", "model", "pipe_engine"}),
    frozenset({"inject", "resume", "stage"}),
    frozenset({"export", "pipeline"}),
    frozenset({"engine", "pretrained"}),
    frozenset({"__init__", "bench"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
FORBIDDEN = "torch.distributed"  # communication goes through deepspeed.comm
# But for the benchmark: it runs FSDP2, and counts what schemes that do not go through deepspeed.comm send.
MAY = {"bench.schemes", "bench.wire"}

Sources = Mapping[str, str]  # {"kernels.front": its source, "kernels.__init__": ..., "__init__": ...}


def imports(module: str, tree: ast.Module, modules: Sources) -> Iterator[tuple[int, str]]:
    """(line, imported module of ds_tsp) for each import of `module`, also inside functions and TYPE_CHECKING blocks."""
    here = [PACKAGE, *module.split(".")][:-1]  # the package that holds the module: `from .` starts there
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _within(node.lineno, alias.name, modules)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join(base + (node.module.split(".") if node.module else []))
            for alias in node.names:  # `from .x import y`: y is a module of the package x, or a name in the module x
                full = f"{source}.{alias.name}"
                yield from _within(node.lineno, full if _key(full, modules) else source, modules)


def _key(dotted: str, modules: Sources) -> str | None:
    if dotted == PACKAGE:
        return "__init__"
    inside = dotted.removeprefix(PACKAGE + ".")
    return next((key for key in (inside, f"{inside}.__init__") if key in modules and inside != dotted), None)


def _within(line: int, dotted: str, modules: Sources) -> Iterator[tuple[int, str]]:
    if dotted.split(".")[0] == PACKAGE:
        yield line, _key(dotted, modules) or dotted.removeprefix(PACKAGE + ".")


def forbidden(tree: ast.Module) -> Iterator[int]:
    """Lines that import torch.distributed, reach it as an attribute of torch, or name it for importlib."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"[\w.]+", node.value) else []
        if any(name == FORBIDDEN or name.startswith(FORBIDDEN + ".") for name in names):
            yield node.lineno


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every cycle that a depth-first walk closes, each as [a, b, ..., a]."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for below in sorted(graph.get(node, ())):
                walk(below, [*path, node])
            done.add(node)

    for node in sorted(graph):
        walk(node, [])
    return found


def violations(modules: Sources) -> list[str]:
    """What is wrong with the layering of these sources, one line each."""
    wrong: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        tree = ast.parse(source)
        unit = module.split(".")[0]
        if unit not in LEVEL:
            wrong.append(f"{unit}: not in the table LEVELS of tests/unit/test_layering.py; put it on its level there")
        for line, target in imports(module, tree, modules):
            graph.setdefault(module, set()).add(target)
            other = target.split(".")[0]
            if unit != other and other in LEVEL and unit in LEVEL and LEVEL[other] >= LEVEL[unit]:
                wrong.append(
                    f"{module}:{line} imports {target}: level {LEVEL[unit]} from {LEVEL[other]}, arrows point down only"
                )
        lines = () if module in MAY else sorted(set(forbidden(tree)))
        wrong += [f"{module}:{line} uses {FORBIDDEN}; use deepspeed.comm" for line in lines]
    return wrong + [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def sources_of(root: Path) -> dict[str, str]:
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text() for path in sorted(root.rglob("*.py"))
    }


def test_ds_tsp_is_layered() -> None:
    sources = sources_of(ROOT)
    assert {"layout", "mesh", "comm", "engine", "kernels.__init__"} <= set(sources)  # not an empty walk
    assert violations(sources) == []


def test_the_imports_of_comm_are_read_right() -> None:
    sources = sources_of(ROOT)
    found = {target for _, target in imports("comm", ast.parse(sources["comm"]), sources)}
    assert found == {"layout", "mesh"}


KERNELS = {"kernels.__init__": "from .front import attend", "kernels.front": "from . import block", "kernels.block": ""}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        pytest.param({"layout": "", "comm": "from .layout import pack\nfrom ds_tsp import layout"}, [], id="down"),
        pytest.param(KERNELS | {"attention": "from .kernels import attend\nfrom . import kernels"}, [], id="package"),
        pytest.param({"comm": "", "data": "", "layout": "import torch\nfrom deepspeed import comm"}, [], id="outside"),
        pytest.param({"mesh": "", "layout": "x = 1\nfrom .mesh import Mesh"}, ["layout:2 imports mesh"], id="up"),
        pytest.param({"mesh": "", "layout": "import ds_tsp.mesh as m"}, ["layout:1 imports mesh"], id="up-absolute"),
        pytest.param({"fold": "", "comm": "def f():\n  from . import fold"}, ["comm:2 imports fold"], id="up-lazy"),
        pytest.param({"vocab": "", "schedules": "from . import vocab"}, ["schedules:1 imports vocab"], id="sideways"),
        pytest.param({"__init__": "", "mesh": "from . import __version__"}, ["mesh:1 imports __init__"], id="to-top"),
        pytest.param(
            KERNELS | {"comm": "", "kernels.x": "from ..comm import a"}, ["kernels.x:1 imports comm"], id="out"
        ),
        pytest.param(
            KERNELS | {"layout": "from .kernels.block import a"},
            ["layout:1 imports kernels.block"],
            id="up-into-package",
        ),
        pytest.param(
            KERNELS | {"kernels.block": "from .front import attend"},
            ["cycle: kernels.front -> kernels.block -> kernels.front"],
            id="cycle-in-package",
        ),
        pytest.param({"helpers": ""}, ["helpers: not in the table LEVELS"], id="unknown"),
        pytest.param({"comm": "import torch.distributed as d"}, ["comm:1 uses torch.distributed"], id="import"),
        pytest.param({"comm": "from torch import distributed"}, ["comm:1 uses torch.distributed"], id="from-torch"),
        pytest.param(
            {"mesh": "from torch.distributed.nn import functional"}, ["mesh:1 uses torch.distributed"], id="from-deep"
        ),
        pytest.param(
            {"data": "import torch\n\ntorch.distributed.all_reduce(x)"},
            ["data:3 uses torch.distributed"],
            id="attribute",
        ),
        pytest.param(
            {"data": "import_module('torch.distributed.nn')"}, ["data:1 uses torch.distributed"], id="importlib"
        ),
        pytest.param({"data": '"""Not torch.distributed."""\nimport torch.distributions'}, [], id="only-named"),
        pytest.param(
            dict.fromkeys(("bench.wire", "bench.report"), "import torch.distributed"),
            ["bench.report:1 uses torch.distributed"],
            id="excepted",
        ),
    ],
)
def test_checker(sources: dict[str, str], expected: list[str]) -> None:
    found = violations(sources)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found
