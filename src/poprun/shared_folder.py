"""The folder `.poprun` in the checkpoint folder, through which the popruns of an elastic run know each other.

    node-a-x3f_9k2   the record of one node; its poprun writes it again every second, with a higher counter
    state-12         the newest state of the rounds (`nodes.Round`)

A state is created by a hard link, which fails if the name exists: so of several nodes that change the state at the same
time, one succeeds. All nodes read the same states, and no node has to be reached for it.
"""

import os
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class RunLost(Exception):
    """Raised if the run can't continue, or if this poprun can't take part in it (exit code 2). The text is "" if the
    cause has been printed."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class SharedFolder:
    """The folder in `checkpoint_dir`, which is created if it is missing. The random name of `private`, poprun's
    temporary folder, becomes part of the node's name. Raises: RunLost"""

    def __init__(self, checkpoint_dir: str, private: str) -> None:
        self._folder = Path(checkpoint_dir) / ".poprun"
        self._record, self._number = record_path(checkpoint_dir, private), -1
        self.name = self._record.name.removeprefix("node-")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunLost(
                f"--checkpoint-dir {checkpoint_dir}: {error}\n"
                "  fix: a folder in which this user can write, on a file system with hard links",
                code=2,
            ) from None

    def read_state(self) -> str:
        """Return the newest state; "" if there is none or it can't be read."""
        numbers = [name[6:] for name in os.listdir(self._folder) if name.startswith("state-")]
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=-1)
        with suppress(OSError, ValueError):
            return (self._folder / f"state-{self._number}").read_text()
        return ""

    def replace_state(self, new: str) -> None:
        """Create the state that follows the one that was read last, atomically, unless another node has done so."""
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, self._folder / f"state-{self._number + 1}")
                (self._folder / f"state-{self._number - 1}").unlink(missing_ok=True)

    def read_records(self) -> dict[str, str]:
        """Return the records of all nodes, by name. Those that can't be read are missing."""
        records: dict[str, str] = {}
        for path in self._folder.glob("node-*"):
            with suppress(OSError, ValueError):
                records[path.name[5:]] = path.read_text()
        return records

    def remove_records(self, names: Iterable[str]) -> None:
        """Remove records of other nodes, which were killed. One that was only stopped writes its record again."""
        for name in names:
            if name != self.name:
                (self._folder / f"node-{name}").unlink(missing_ok=True)

    def write_record(self, text: str) -> None:
        """Write this node's record, in place: this needs no space on a full disk."""
        with open(os.open(self._record, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(text)
            file.truncate()

    def close(self, is_end: bool) -> None:
        """Remove this node's record; at the end of the run, if this is the last node, also the states."""
        with suppress(OSError):
            self._record.unlink(missing_ok=True)
            if is_end and not list(self._folder.glob("node-*")):
                for path in self._folder.glob("state-*"):
                    path.unlink(missing_ok=True)


def record_path(checkpoint_dir: str, private: str) -> Path:
    """Return the path of the record of the node whose poprun has the temporary folder `private`."""
    suffix = Path(private).name.rpartition("-")[2]
    return Path(checkpoint_dir) / ".poprun" / f"node-{socket.gethostname()}-{suffix}"
