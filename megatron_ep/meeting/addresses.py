"""The addresses of this machine, and the choice of the one that it listens on."""

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
    """Returns the address on which other ranks reach this machine: that of MEGATRON_EP_ADDRESS, or the source address
    of its route to the store of torch.distributed.

    Raises ValueError if the variable is neither an address nor a network of this machine.
    """
    wanted = os.environ.get(VARIABLE)
    return address_by_route() if not wanted else address_in(wanted)


def address_in(wanted: str) -> str:
    """Returns `wanted` if it is an address; for a network such as 10.1.0.0/16 this machine's first address in it."""
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
            probe.connect(target)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def interfaces() -> list[tuple[str, Interface]]:
    """Returns the names and addresses of interfaces that are up: the first IPv4 address of each, and all IPv6 addresses
    that are not link-local."""
    found: list[tuple[str, Interface]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asked, which, request)[20:24])
                    for which in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:  # the interface has no IPv4 address
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
