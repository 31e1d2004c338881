"""Errors of communication between ranks. An invalid argument on this rank raises ValueError instead."""

from collections import Counter
from collections.abc import Sequence
from typing import Any


class EPError(RuntimeError):
    """A launch did not finish. The buffer refuses further calls until `reset()`.

    incidents: what each role of this rank was doing when it gave up, the likeliest cause first. The message has the
        first one and the number of the others. Each is a dict with the keys outcome, role, waiting_for, rank, channel,
        peer, seen, expected, call.
    """

    def __init__(self, message: str, incidents: list[dict[str, Any]] | None = None):
        super().__init__(message)
        self.incidents = incidents or []


class EPTimeoutError(EPError):
    """A wait took longer than `Config.timeout`, on this rank or on another rank in the same call."""


class EPStuckError(EPTimeoutError):
    """A launch hangs in a call of NVSHMEM or NCCL, which waits for a network or rank that does not answer.

    The launch cannot be stopped. This process can no longer use its GPU and has to end (`os._exit`, a signal).
    """


class EPAbortError(EPError):
    """Another rank refused its arguments, was interrupted, failed earlier or ended, or the connection to it broke."""


class EPMaskedError(EPError):
    """Other ranks considered this one dead, masked it, and continue without it.

    Outputs of this rank since then are NaN (-1 in integer tensors). It can take part again after a reset of all ranks,
    or in a new process: see `LowLatency.readmit`.
    """


class EPOverflowError(EPError):
    """More rows came than there was room for: in a table of the protocol, or in a layer's fixed number of rows."""


class BusyError(RuntimeError):
    """Another thread is in a call of this buffer. The refused call has changed nothing."""

    def __init__(self, message: str = "the buffer is in use by another thread"):
        super().__init__(message)


HOW_TO_GO_ON = "every rank must call buffer.reset() before the buffer is used again"
# By the outcome of a call, see `Backend.aborted`; the others raise EPAbortError.
ERRORS: dict[str, type[EPError]] = {
    "timeout": EPTimeoutError,
    "overflow": EPOverflowError,
    "cut_off": EPMaskedError,
    **dict.fromkeys(("mismatch", "no_layout", "masked"), EPError),
}


def error_of(
    outcome: str, cause: str, incidents: list[dict[str, Any]], *, heard: str = "", backward_pass: str = ""
) -> EPError:
    """Returns the error that a caller raises because a rank gave up.

    outcome: see `Backend.aborted`.
    cause: its first line, see `diagnosis.cause.find`.
    incidents: of the ranks of this process, see `EPError`.
    heard: what the rank that gave up first waited for, if it said so.
    backward_pass: see `CallLog.backward_pass`.
    """
    lines = summarize(incidents)
    if heard and heard not in lines:
        lines.insert(0, heard)  # the rank that gave up first is not readable from here
    if backward_pass:
        lines.append(f"{backward_pass}: does the loss contain its output on all ranks?")
    return ERRORS.get(outcome, EPAbortError)("\n  ".join([cause, *lines, HOW_TO_GO_ON]), incidents)


def by_cause(incidents: Sequence[dict[str, Any]], first_rank: int) -> list[dict[str, Any]]:
    """Sorts incidents, the likeliest cause first.

    Waits that expired come before waits that were aborted, those of the rank that gave up first before the others', and
    rarer roles before frequent ones, because one stuck role keeps many receivers waiting.
    """
    often = Counter(incident["role"] for incident in incidents)
    return sorted(incidents, key=lambda i: (i["outcome"] == "aborted", i["rank"] != first_rank, often[i["role"]]))


def summarize(incidents: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line for the first incident and one that counts the others by role."""
    if len(incidents) < 2:
        return [describe(incident) for incident in incidents]
    others = Counter(incident["role"] for incident in incidents[1:])
    roles = ", ".join(f"{count} {role}" for role, count in others.most_common())
    count = len(incidents) - 1
    many = f"{count} others that waited" if count > 1 else "another that waited"
    return [describe(incidents[0]), f"and {many}, see the error's incidents: {roles}"]


def describe(incident: dict[str, Any]) -> str:
    """Returns one line: which role of which rank waited for what, and from which rank.

    Notifies are counted separately, dispatches and combines together.
    """
    where = f"rank {incident['rank']}, {incident['role']}, channel {incident['channel']}, call {incident['call']}"
    if incident["outcome"] == "mismatch" and incident["waiting_for"] != "nothing":
        return f"{where}: {incident['waiting_for']}, rank {incident['peer']}: no rank can have {incident['seen']}"
    whats = {
        "mismatch": f"what rank {incident['peer']} sent is not of this call",
        "bad_input": "invalid expert ids",
        "no_layout": "the counts of this handle's dispatch were never exchanged",
        "masked": f"rank {incident['peer']} was masked since the forward pass",
        "cut_off": f"rank {incident['peer']} goes on without this rank",
        "overflow": f"room for {incident['seen']} rows, {incident['expected']} are needed",
    }
    waited = f"waited for {incident['waiting_for']} from rank {incident['peer']}"
    counts = f"seen {incident['seen']}, expected {incident['expected']}"
    return f"{where}: {whats.get(incident['outcome'], f'{waited}: {counts}')}"
