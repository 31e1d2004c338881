"""The stubs say what the compiled modules have: the same names, with parameters of the same names."""

import ast
import re
from pathlib import Path

from megatron_ep import _C, _simulate

FOLDER = Path(_C.__file__).parent
WITH_CUDA = {
    "DeviceMemory",
    "cuda_launcher",
    "cuda_low_latency",
    "PinnedReport",
    "QueueHeap",
    "queue_launcher",
    "queue_low_latency",
    "run_deferred",
    "dequantize_cuda",
    "has_native_atomics",
    "nic_of_gpu",
    "quantize_cuda",
    "router_forward_cuda",
    "router_backward_cuda",
    "try_card",
}
OF_PYBIND11 = {"_pybind11_conduit_v1_", "name", "value"}  # the last two of an enum
VALUE = "a value"  # of a property, attribute or enum's member


def signature(function: ast.FunctionDef):
    """Names of positional and of keyword parameters, and of those with a default."""
    arguments = function.args
    positional = [a.arg for a in arguments.args if a.arg != "self"]
    optional = positional[len(positional) - len(arguments.defaults) :]
    return positional, [a.arg for a in arguments.kwonlyargs], optional


def declared(body, classes):
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [classes[base.id] for base in node.bases]
            own = declared(node.body, classes)
            found[node.name] = classes[node.name] = {
                name: value for base in bases for name, value in base.items()
            } | own
        elif isinstance(node, ast.FunctionDef) and node.name != "__int__":
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            found[node.name] = VALUE if is_property else signature(node)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = VALUE
    return found


def compiled_signature(function):
    """From the first line that pybind11 writes into the docstring."""
    line = re.sub(r"<[^<>]*>", "None", function.__doc__.splitlines()[0])
    [node] = ast.parse(f"def {line}: ...").body
    return signature(node)


def compiled(owner):
    found = {}
    for name in dir(owner):
        value = getattr(owner, name)
        if isinstance(owner, type) and name in OF_PYBIND11:
            continue
        if name == "__init__" and "self: " in value.__doc__:
            found[name] = compiled_signature(value)
        elif name.startswith("__"):
            continue
        elif isinstance(value, type):
            found[name] = compiled(value)
        else:
            found[name] = compiled_signature(value) if callable(value) and value.__doc__ else VALUE
    return found


def test_the_stub_is_that_of_the_module():
    expected = declared(ast.parse((FOLDER / "_C.pyi").read_text()).body, {})
    assert expected.keys() >= WITH_CUDA
    if not hasattr(_C, "cuda_launcher"):
        expected = {name: value for name, value in expected.items() if name not in WITH_CUDA}
    assert compiled(_C) == expected


def test_the_stub_is_that_of_the_simulator():
    assert compiled(_simulate) == declared(ast.parse((FOLDER / "_simulate.pyi").read_text()).body, {})
