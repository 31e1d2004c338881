"""The GPU tests on a machine that has torch and pytest alone: what they lack is skipped, not an error."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_turns
import pytest

ROOT = Path(__file__).parents[2]
# None in sys.modules: an import of that name fails as if nothing were installed.
COLLECT = """
import sys
import pytest
sys.modules.update(dict.fromkeys(sys.argv[1:]))
sys.exit(pytest.main("--collect-only -q -p no:cacheprovider -c /dev/null --rootdir . tests/gpu".split()))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [("pydantic",), ("megatron", "megatron.core", "pydantic", "transformer_engine")])
def test_gpu_tests_are_collected_without(missing):
    command = [sys.executable, "-c", COLLECT, *missing]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def test_who_measures_a_gpu_is_alone(tmp_path):
    inside, seen = [], {True: [], False: []}

    def run(alone):
        for _ in range(20):
            with gpu_turns.turn(alone, tmp_path):
                inside.append(alone)
                seen[alone].append(len(inside))
                time.sleep(1e-3)
                assert not alone or inside == [True]
                inside.pop()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(run, [False, False, True, False, True, False]))
    assert set(seen[True]) == {1} and max(seen[False]) > 1
