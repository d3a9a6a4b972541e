"""No network in tests: sockets of this process reach this machine only.

A test that quietly downloads something passes where it was written and fails where it matters. ``refuse_network``
replaces the connecting methods of Python's sockets; what C++ code opens (gloo, TCPStore) is bound to loopback by the
tests that start ranks.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


class NetworkRefused(OSError):
    """A test tried to reach another machine."""


def is_local(address: Any) -> bool:
    """Whether a socket address (of any family) is on this machine. Names are not looked up; only ours are known."""
    if not isinstance(address, tuple) or not address:
        return True  # AF_UNIX paths, netlink
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in ("", "localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname()):
        return True
    try:
        ip = ipaddress.ip_address(str(host).split("%")[0])
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


def refuse_network() -> None:
    """From now on, connecting or sending to another machine raises :class:`NetworkRefused` (also if called twice)."""
    if getattr(socket.socket.connect, "refuses_network", False):
        return
    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
    create = socket.create_connection

    def create_connection(address: Any, *args: Any, **kwargs: Any) -> socket.socket:
        _check(address)  # before the name is looked up
        return create(address, *args, **kwargs)

    socket.create_connection = create_connection


def _guarded(method: Any) -> Any:
    def guarded(self: socket.socket, *args: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _check(args[-1] if args else None)
        return method(self, *args)

    guarded.refuses_network = True  # type: ignore[attr-defined]
    return guarded


def _check(address: Any) -> None:
    if not is_local(address):
        raise NetworkRefused(f"tests do not use the network: refused to reach {address!r}")
