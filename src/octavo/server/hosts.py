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
from collections.abc import Callable

from octavo.server.config import ServeConfig

_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


def own_hosts(config: ServeConfig) -> Callable[[str], bool]:
    """Return what tells whether a Host header names this server.

    Without keys its names are localhost, the address or name that ``config`` listens on, and the
    names it allows; on loopback also loopback's addresses, elsewhere any address and this machine's
    name. With keys, or on a Unix socket, a page can do nothing: any host is own unless some are
    allowed.
    """
    own = _name(config.host)
    allowed = [_name(each) for each in config.allowed_hosts]
    if "*" in allowed or (not allowed and (config.keys or config.uds is not None)):
        return lambda host: True
    names = {"localhost", own, *allowed} - {""}
    suffixes = (".localhost", *(each[1:] for each in allowed if each.startswith("*.")))
    address = _address(own)
    loopback = own.endswith(suffixes) or own == "localhost"
    if address is not None:
        loopback = address.is_loopback
    if not loopback:
        machine = _name(socket.gethostname())
        short = machine.partition(".")[0]
        names |= {machine, short, f"{short}.local"}

    def is_own(host: str) -> bool:
        match = _AUTHORITY.fullmatch(host)
        name = "" if match is None else _name(match[1])
        if name in names or name.endswith(suffixes):
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not loopback)

    return is_own


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
