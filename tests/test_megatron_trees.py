"""Which trees of Megatron-LM the tests take, and what is said where there are none."""

import os
import subprocess
import sys
from pathlib import Path

import megatron_trees

PROGRAM = Path(megatron_trees.__file__)


def shown(**variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_LM")}
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), done.stderr


def test_where_trees_are(tmp_path):
    version = megatron_trees.installed_version()
    cache = tmp_path / "megatron-lm"
    for name in (f"core_v{version}.0", f"core_v{version}.1", "core_v0.1.0"):
        (cache / name).mkdir(parents=True)
        (cache / name / "pretrain_gpt.py").touch()
    (cache / "empty").mkdir()
    lines, said = shown(XDG_CACHE_HOME=str(tmp_path))
    assert lines == [
        f"export MEGATRON_LM={cache}/core_v{version}.1",
        f"export MEGATRON_LM_OTHERS={cache}/core_v0.1.0:{cache}/core_v{version}.0",
    ]
    assert f"NOT RUN: the parser of Megatron-LM main: no {cache}/main" in said and "pretrain_gpt" not in said
    assert shown(XDG_CACHE_HOME=str(tmp_path), MEGATRON_LM="/a", MEGATRON_LM_OTHERS="/b:/c")[0] == [
        "export MEGATRON_LM=/a",
        "export MEGATRON_LM_OTHERS=/b:/c",
    ]
    lines, said = shown(XDG_CACHE_HOME="/nowhere")
    assert lines == ["export MEGATRON_LM=''", "export MEGATRON_LM_OTHERS=''"]
    assert "NOT RUN: pretrain_gpt.py" in said and "CONTRIBUTING.md says how" in said
