"""The addresses of this machine, and on which of them it listens."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

VARIABLE = "MEGATRON_EP_ADDRESS"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # <linux/sockios.h>
IPV6 = Path("/proc/net/if_inet6")

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def own_address() -> str:
    """That on which the others reach this machine: as the variable says, or that from which this machine reaches the
    store of torch.distributed.

    Raises ValueError when the variable is no address, and no network in which this machine has one.
    """
    wanted = os.environ.get(VARIABLE)
    return address_by_route() if not wanted else address_in(wanted)


def address_in(wanted: str) -> str:
    """wanted: an address, or a network ("10.1.0.0/16"), of which this machine's first address is taken."""
    try:
        if "/" not in wanted:
            return str(ipaddress.ip_address(wanted))
        network = ipaddress.ip_network(wanted)
    except ValueError:
        raise ValueError(
            f"environment variable {VARIABLE} is {wanted!r}, must be an IP address, or a network such as 10.1.0.0/16"
        ) from None
    own = interfaces()
    for _, interface in own:
        if interface.ip in network:
            return str(interface.ip)
    there = ", ".join(f"{name} {interface}" for name, interface in own)
    raise ValueError(
        f"environment variable {VARIABLE} is {wanted!r}, must be a network of this machine, which has {there}"
    )


def address_by_route() -> str:
    store = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, _, _, _, target = socket.getaddrinfo(store, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def interfaces() -> list[tuple[str, Interface]]:
    """Name and address of each interface that is up; of IPv4 its first address, of IPv6 all but those of a link."""
    found: list[tuple[str, Interface]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asked, which, request)[20:24])
                    for which in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:  # it has none
                continue
            found.append((name, ipaddress.IPv4Interface(f"{address}/{mask}")))
    try:
        lines = IPV6.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, _, prefix, _, _, name = line.split()
        own = ipaddress.IPv6Interface((int(digits, 16), int(prefix, 16)))
        if not own.is_link_local:
            found.append((name, own))
    return found
