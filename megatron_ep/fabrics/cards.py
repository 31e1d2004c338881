"""The RDMA network cards of this machine, as Linux lists them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/sys/class/infiniband")
NO_CARD = f"no network card for RDMA in {FOLDER}"


def has_cards() -> bool:
    """Returns whether this machine has any network card for RDMA."""
    return any(FOLDER.glob("*"))
