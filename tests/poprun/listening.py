"""Finds the addresses at which processes listen, as Linux tells."""

import ipaddress
import os
from pathlib import Path

_LISTENS = "0A"


def _inodes(pids):
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    return found


def _address(text):
    """Linux writes words of four bytes in the processor's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def addresses(pids=None):
    """(address, port) of each socket at which one of these processes listens; None: any in this network."""
    inodes, found = pids and _inodes(pids), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and (inodes is None or fields[9] in inodes):
                address, port = fields[1].split(":")
                found.append((_address(address), int(port, 16)))
    return sorted(set(found), key=str)
