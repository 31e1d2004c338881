"""What imports what in megatron_ep: no circle between files, one direction between packages, Megatron-Core in two.

Read from the source, so that imports for types, inside functions and by `importlib.import_module` count as well.
"""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_ep"
# Packages and top-level modules of megatron_ep, and "megatron_ep" for the names that it offers. Each may import itself
# and what stands in a line below its own.
FLOORS = [
    {"cli"},
    {"pretrain", "tools", "training"},
    {"deep_ep", "megatron"},
    {"megatron_ep"},
    {"env", "low_latency", "overlap", "sequences"},
    {"router"},
    {"normal"},
    {"buffer"},
    {"fabrics", "float8"},
    {"meeting"},
    {"config", "diagnosis", "errors", "reference"},
    {"_C", "_simulate"},
]
FLOOR = {home: number for number, packages in enumerate(FLOORS) for home in packages}
MAY_IMPORT_MEGATRON_CORE = {"megatron", "training"}
MAX_TOP_FILES = 12
EXTENSIONS = {"_C", "_simulate"}


def read_imports(package):
    """For each module of a package, by its full name: the names of the modules, of any package, that it imports."""
    modules = {_module_name(path, package): path for path in package.rglob("*.py")}
    return {name: set(_imported(path, name, modules)) for name, path in modules.items()}


def find_faults(package):
    """What is wrong, a line each."""
    imports = read_imports(package)
    try:
        own = {name: sorted(imports[name] & imports.keys()) for name in sorted(imports)}
        graphlib.TopologicalSorter(own).prepare()
    except graphlib.CycleError as error:
        yield f"circle: {' -> '.join(reversed(error.args[1]))}"
    for name, names in sorted(imports.items()):
        home = _package(name)
        if home not in FLOOR:
            yield f"{name}: {home} has no place in FLOORS"
            continue
        for other in sorted(names):
            if other.split(".")[0] == "megatron" and home not in MAY_IMPORT_MEGATRON_CORE:
                yield f"{name} imports {other}"
            if other.split(".")[0] == package.name:
                target = _package(other)
                if target != home and FLOOR.get(target, -1) <= FLOOR[home]:
                    yield f"{name} imports {other}: from {home} to {target}"
    for path in sorted(package.rglob("*.py")):
        yield from _private_imports(path, package)


def _private_imports(path, package):
    """Names with an underscore that a file takes from another package of ours."""
    name = _module_name(path, package)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
            for alias in node.names:
                if (
                    alias.name.startswith("_")
                    and alias.name not in EXTENSIONS
                    and _package(node.module) != _package(name)
                ):
                    yield f"{name} imports the private name {alias.name} of {node.module}"


def _module_name(path, package):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(name):
    """The package or top-level module below megatron_ep."""
    return name.split(".")[1] if "." in name else name


def _imported(path, name, modules):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = name.split(".")
                parents = parts[: len(parts) - node.level + (path.name == "__init__.py")]
                origin = ".".join([*parents, *origin.split(".")] if origin else parents)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield full if full in modules or alias.name in EXTENSIONS else origin
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_the_floors_of_the_package():
    imports = read_imports(PACKAGE)
    assert (
        "megatron_ep.buffer.buffer" in imports["megatron_ep"] and "megatron_ep._C" in imports["megatron_ep.router.api"]
    )
    assert list(find_faults(PACKAGE)) == []


def test_only_what_users_name_lies_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_TOP_FILES


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("config", "from . import buffer", "circle: megatron_ep.buffer -> megatron_ep.config -> megatron_ep.buffer"),
        (
            "fabrics/host",
            "def f():\n    from ..buffer import Buffer",
            "megatron_ep.fabrics.host imports megatron_ep.buffer: from fabrics to buffer",
        ),
        (
            "megatron/layer",
            "importlib.import_module('megatron_ep.tools.bench')",
            "megatron_ep.megatron.layer imports megatron_ep.tools.bench: from megatron to tools",
        ),
        ("tools/bench", "def f():\n    from megatron.core import x", "megatron_ep.tools.bench imports megatron.core"),
        (
            "megatron/layer",
            "from megatron_ep.buffer import _private",
            "megatron_ep.megatron.layer imports the private name _private of megatron_ep.buffer",
        ),
        ("new/file", "", "megatron_ep.new.file: new has no place in FLOORS"),
    ],
)
def test_what_would_be_wrong_is_found(tmp_path, file, code, fault):
    package = tmp_path / "megatron_ep"
    files = {
        "__init__": "from megatron_ep.buffer import Buffer",
        "buffer": "from megatron_ep.config import Config\nfrom megatron_ep.fabrics import host",
        "config": "",
        "fabrics/host": "from megatron_ep.config import Config\nfrom megatron_ep import _C",
        "megatron/layer": "import megatron_ep as ep\nfrom megatron.core import parallel_state",
        "training/loop": "from megatron_ep.megatron import layer\nimport megatron.core",
        "tools/bench": "from megatron_ep.megatron import layer",
        "cli/main": "from megatron_ep.tools import bench\nfrom megatron_ep.training import loop",
    }

    def write(name, text):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, text in files.items():
        write(name, text)
    assert list(find_faults(package)) == []
    write(file, f"{files.get(file, '')}\n{code}")
    assert fault in list(find_faults(package))
