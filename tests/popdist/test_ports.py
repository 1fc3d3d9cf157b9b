"""Ports for programs that tests start."""

from pathlib import Path

from ports import free_port


def test_a_free_port_is_given_to_no_socket_that_names_none():
    """Else the system may give it to another program before the one that is to listen there has started."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(port < first for port in (free_port() for _ in range(100)))
