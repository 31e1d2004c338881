"""What a mutant is, and the names that several tables use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below csrc
    text: str  # occurs exactly once; the statement in « », or all of it
    replacement: str = ""
    programs: tuple[str, ...] = ("p2p",)

    def parts(self) -> tuple[str, str, str]:
        """What stands before the statement, the statement, what stands behind it."""
        before, mark, rest = self.text.partition("«")
        if not mark:
            return "", self.text, ""
        statement, _, after = rest.partition("»")
        return before, statement, after


def changed(name: str, file: str, statement: str, old: str, new: str, programs: tuple[str, ...] = ("p2p",)) -> Mutant:
    """A statement in which one text is replaced by another."""
    assert old in statement, name
    mark = Mutant(name, file, statement).parts()[1]
    return Mutant(name, file, statement, mark.replace(old, new), programs)


BULK, WARP, KERNELS = "exec/device/bulk.h", "exec/device/device_warp.h", "launch/cuda/kernels.h"
RING, DISPATCH, COMBINE = "protocol/ring.h", "protocol/dispatch.h", "protocol/combine.h"
COORDINATORS, NOTIFY = "protocol/coordinators.h", "protocol/notify.h"
P2P, NCCL = "fabric/cuda/p2p_fabric.h", "fabric/nccl/nccl_fabric.h"
ROWS = ("rows",)
SYSTEM, RANK = "<Scope::System>", "<Scope::Rank>"
QUEUES = ("queue",)
MET = "return nothing_to_wait_for();"
LL = ("low_latency",)
