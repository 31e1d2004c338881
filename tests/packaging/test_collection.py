"""The GPU tests on a machine that has torch and pytest alone: what they lack is skipped, not an error."""

import subprocess
import sys
from pathlib import Path

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
