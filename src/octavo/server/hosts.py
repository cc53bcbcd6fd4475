"""The names that a server answers to.

A page on the web may let its own name point to an address of whoever reads it (DNS rebinding). To
the browser a server there is then the page's own, and the page may read its answers. The page
cannot choose the Host header: it has the page's name. So a server that asks for no key answers
only to what no stranger's name can be.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.config import ServeConfig
from octavo.server.errors import ApiError
from octavo.server.exchange import Exchange
from octavo.server.gate import answer_error

_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


class Hosts:
    """A layer that refuses requests for other hosts.

    Without keys, own are localhost, the address or name that ``config`` listens on, and the names
    it allows; on loopback also loopback's addresses, elsewhere any address and this machine's name.
    With keys, or on a Unix socket, a page can do nothing: any host is own unless some are allowed.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        own = _name(config.host)
        allowed = [_name(each) for each in config.allowed_hosts]
        self._any = "*" in allowed or (
            not allowed and (bool(config.keys) or config.uds is not None)
        )
        self._names = {"localhost", own, *allowed} - {""}
        self._suffixes = (".localhost", *(each[1:] for each in allowed if each.startswith("*.")))
        address = _address(own)
        self._loopback = self._ends(own) or own == "localhost"
        if address is not None:
            self._loopback = address.is_loopback
        if not self._loopback:
            machine = _name(socket.gethostname())
            short = machine.partition(".")[0]
            self._names |= {machine, short, f"{short}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        host = exchange.headers.get(b"host")  # None: HTTP/1.0, which no browser speaks
        if host is None or self.own(host.decode("latin-1")):
            await self._app(scope, receive, send)
            return
        failure = ApiError(
            421,
            f"the host {host.decode('latin-1')!r} is not one of this server's names "
            "(--allowed-hosts adds names)",
        )
        await answer_error(send, exchange, failure)

    def own(self, host: str) -> bool:
        """Whether a Host header names this server."""
        if self._any:
            return True
        match = _AUTHORITY.fullmatch(host)
        name = "" if match is None else _name(match[1])
        if name in self._names or self._ends(name):
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not self._loopback)

    def _ends(self, name: str) -> bool:
        return name.endswith(self._suffixes)


def _name(host: str) -> str:
    """As it is compared: names are the same in capitals, and with the root's dot."""
    return host.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return found if mapped is None else mapped
