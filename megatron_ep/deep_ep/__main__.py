"""Runs a script with megatron_ep.deep_ep as `deep_ep`:

python -m megatron_ep.deep_ep script.py ARGS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_ep.deep_ep import install


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        given = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        print(
            f"megatron_ep.deep_ep: SCRIPT is {given}, must be a file: python -m megatron_ep.deep_ep SCRIPT ARGS...",
            file=sys.stderr,
        )
        sys.exit(2)
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)  # as Python does for a script
    install()  # after the line above, because processes that the script spawns get this path
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
