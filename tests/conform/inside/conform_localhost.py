"""A pytest plugin: localhost is ::1 as well, where /etc/hosts has it for 127.0.0.1 only.

Containers often lack that line; without it a quarter of anyio's socket tests cannot run.
"""

import socket

_resolve = socket.getaddrinfo


def getaddrinfo(host, port, family=0, *arguments, **options):
    if host not in ("localhost", b"localhost") or family == socket.AF_INET:
        return _resolve(host, port, family, *arguments, **options)
    found = _resolve("::1", port, socket.AF_INET6, *arguments, **options)
    if family == 0:
        found += _resolve(host, port, socket.AF_INET, *arguments, **options)
    return found


def _names_ipv6():
    try:
        return bool(_resolve("localhost", None, socket.AF_INET6))
    except socket.gaierror:
        return False


if socket.has_dualstack_ipv6() and not _names_ipv6():
    socket.getaddrinfo = getaddrinfo
