"""Memory that processes of a machine share: what is mapped is what its rank has made."""

import os

import pytest

from megatron_ep import _C

BYTES = 1 << 20


def test_an_address_is_believed_only_as_far_as_it_can_be_checked(tmp_path) -> None:
    own = _C.Segment.shared(BYTES)
    process, descriptor, device, inode = own.address()
    _C.Segment.open((process, descriptor, device, inode), BYTES)
    with pytest.raises(RuntimeError, match="has less than 1052672 bytes"):
        _C.Segment.open((process, descriptor, device, inode), BYTES + 4096)
    with pytest.raises(RuntimeError, match="is not another rank's shared memory"):
        _C.Segment.open((process, descriptor, device, inode + 1), BYTES)
    with open("/dev/null", "r+") as other:
        status = os.fstat(other.fileno())
        with pytest.raises(RuntimeError, match="has less than"):
            _C.Segment.open((process, other.fileno(), status.st_dev, status.st_ino), BYTES)
