"""The names that a server answers to.

A page on the web may let its own name point to an address of its reader (DNS rebinding). The
browser then takes a server there for the page's own, and lets the page read its answers. The page
cannot choose the Host header: it has the page's name. So a server that asks for no key answers only
to names that no stranger can have.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from octavo.server.config import ServeConfig

_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class Hosts:
    """The hosts that belong to a server.

    Without keys these are localhost, the address or name that ``config`` listens on, and the names
    it allows; on loopback also loopback's addresses, elsewhere any address and this machine's name.
    With keys, or on a Unix socket, a page can do nothing: any host is own unless some are allowed.
    """

    def __init__(self, config: ServeConfig) -> None:
        own = _name(config.host)
        allowed = [_name(each) for each in config.allowed_hosts]
        self._any = "*" in allowed or (
            not allowed and (bool(config.keys) or config.uds is not None)
        )
        self._names = {"localhost", own, *allowed} - {""}
        self._suffixes = (".localhost", *(each[1:] for each in allowed if each.startswith("*.")))
        address = _address(own)
        self._loopback = own.endswith(self._suffixes) or own == "localhost"
        if address is not None:
            self._loopback = address.is_loopback
        if not self._loopback:
            machine = _name(socket.gethostname())
            short = machine.partition(".")[0]
            self._names |= {machine, short, f"{short}.local"}

    def own(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        if self._any:
            return True
        match = _AUTHORITY.fullmatch(host)
        name = "" if match is None else _name(match[1])
        if name in self._names or name.endswith(self._suffixes):
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not self._loopback)


def _name(host: str) -> str:
    """Return a name as it is compared: without capitals and the root's dot."""
    return host.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return found if mapped is None else mapped
