from pathlib import Path


def names() -> set[str]:
    """Of the project's shared memory on this machine. Segments of any process have one for a moment, until they are
    mapped: what a test has left behind is what stays."""
    return {path.name for path in Path("/dev/shm").glob("megatron_ep-*")}
