"""How programs that import deep_ep get ours."""

import os
import textwrap

import pytest
import rank_processes

import megatron_ep.deep_ep

SCRIPT = """
    import importlib.util
    import subprocess
    import sys

    import deep_ep
    import sibling
    from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t
    from deep_ep.utils import EventHandle as OtherHandle
    from deep_ep.utils.event import EventOverlap as OtherOverlap

    import megatron_ep.deep_ep

    assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "3"], sys.argv
    assert deep_ep.utils.EventOverlap is EventOverlap and deep_ep.utils.event.EventHandle is EventHandle
    assert EventHandle is OtherHandle and EventOverlap is OtherOverlap and Buffer is megatron_ep.deep_ep.Buffer
    assert importlib.util.find_spec("deep_ep").origin == deep_ep.__file__
    assert not hasattr(deep_ep, "HybridEPBuffer") and not hasattr(deep_ep, "EPBuffer")
    try:
        from deep_ep import EPBuffer
    except ImportError as error:
        assert "does not have DeepEP's EPBuffer, but Buffer and ElasticBuffer" in str(error), error
    else:
        raise AssertionError(EPBuffer)
    command = [sys.executable, "-c", "import deep_ep.utils.event; print(deep_ep.__version__)"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    print(deep_ep.__version__, child.stdout.strip(), sibling.NAME)
"""


def run(folder, *arguments, **environment):
    return rank_processes.run_one(arguments, folder, **environment)


def test_a_script_and_its_children(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "scripts" / "sibling.py").write_text("NAME = 'beside'\n")
    done = run(tmp_path, "-m", "megatron_ep.deep_ep", "scripts/script.py", "--flag", "3")
    version = megatron_ep.deep_ep.__version__
    assert (done.returncode, done.stdout.split()) == (0, [version, version, "beside"]), done.stderr
    assert "megatron_ep" in version


SPAWNING = """
    import multiprocessing

    import deep_ep

    if __name__ == "__main__":
        process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
        process.start()
        process.join()
        print(process.exitcode)
"""


@pytest.mark.nightly
def test_a_process_that_a_script_spawns_imports_it_again(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SPAWNING))
    done = run(tmp_path, "-m", "megatron_ep.deep_ep", "script.py")
    assert done.stdout.split() == ["spawned", "0"], done.stderr


def test_no_script(tmp_path):
    done = run(tmp_path, "-m", "megatron_ep.deep_ep", "missing.py")
    assert done.returncode == 2 and "SCRIPT is missing.py, must be a file" in done.stderr
    assert "SCRIPT is nothing" in run(tmp_path, "-m", "megatron_ep.deep_ep").stderr


def test_beside_another_deep_ep(tmp_path):
    (tmp_path / "deep_ep.py").write_text("__version__ = 'theirs'\n")
    lines = (
        "import megatron_ep.deep_ep as ours; ours.install(); ours.install(); import deep_ep; print(deep_ep.__version__)"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, "-c", lines, PYTHONPATH=paths)
    assert done.stdout.strip() == megatron_ep.deep_ep.__version__, done.stderr
    done = run(tmp_path, "-c", f"import deep_ep; {lines}", PYTHONPATH=paths)
    assert done.returncode == 1 and f"ValueError: deep_ep is {tmp_path}" in done.stderr
