"""Where Megatron-LM's trees are: the one place that decides, for all tests and for .ci/run.

MEGATRON_LM names the tree of the installed megatron-core's version, MEGATRON_LM_OTHERS those of other versions, divided
by colons. Where neither is set, the folders of ${XDG_CACHE_HOME:-~/.cache}/megatron-lm are taken, which have the names
of Megatron-LM's tags and branches. As a program: prints both variables for a shell, and on stderr what is not run.
"""

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron-lm")
TAGS = ("core_v0.16.1", "core_v0.19.0", "main")
HELP = "CONTRIBUTING.md says how to get it"


def installed_version():
    """As 0.16, or None."""
    try:
        return metadata.version("megatron-core").rpartition(".")[0]
    except metadata.PackageNotFoundError:
        return None


def _find():
    named = [os.environ.get(name, "").split(":") for name in ("MEGATRON_LM", "MEGATRON_LM_OTHERS")]
    named = [[Path(tree) for tree in trees if tree] for trees in named]
    if any(named):
        return named
    found = [path.parent for path in sorted(CACHE.glob("*/pretrain_gpt.py"))]
    installed = [path for path in found if path.name.startswith(f"core_v{installed_version()}.")][-1:]
    return installed, [path for path in found if path not in installed]


_installed, OTHERS = _find()
INSTALLED = _installed[0] if _installed else None  # the tree that can be run
ALL = [*_installed, *OTHERS]  # those whose parsers can be asked
LACK = None if INSTALLED else f"no tree of Megatron-LM {installed_version()} in MEGATRON_LM or {CACHE}; {HELP}"
LACK_ALL = None if ALL else f"no tree of Megatron-LM in MEGATRON_LM, MEGATRON_LM_OTHERS or {CACHE}; {HELP}"


def main():
    print("Megatron-LM:", *ALL, file=sys.stderr)
    if LACK:
        print(f"NOT RUN: pretrain_gpt.py and all around it: {LACK}", file=sys.stderr)
    for tag in TAGS:
        if not any(path.name == tag for path in ALL) and not os.environ.get("MEGATRON_LM_OTHERS"):
            print(f"NOT RUN: the parser of Megatron-LM {tag}: no {CACHE / tag}; {HELP}", file=sys.stderr)
    for name, trees in (("MEGATRON_LM", _installed), ("MEGATRON_LM_OTHERS", OTHERS)):
        print(f"export {name}={shlex.quote(':'.join(map(str, trees)))}")


if __name__ == "__main__":
    main()
