"""Python programs as forks of a process that has loaded torch: they start in parts of a second, and import Pando anew.

`[*quick_python.words(), "-c", code]` is a command line, as `[sys.executable, "-c", code]` is. `put_on_path(folder)`
makes programs python, python3, poprun, popvision and ipujob for shells. This file is also the server and its client:

    python quick_python.py serve SOCKET                     forks for each client, until its standard input is closed
    python -S quick_python.py SOCKET -c CODE | -m MODULE | FILE, ARGUMENTS...

A client gives its arguments, environment, folder and standard streams to the fork, and ends with its exit code. A fork
whose client is killed goes on: programs that are killed need processes of their own.
"""

import json
import os
import socket
import sys

PROGRAMS = {"python": "", "python3": "", **{name: f"-m {name}" for name in ("poprun", "popvision", "ipujob")}}
_server: list = []  # the server of this process: the folder of its socket, and the process, whose input is open


def words() -> list[str]:
    """Return the command line to which a program's words are added. Starts the server at the first call."""
    if not _server:
        import subprocess
        import tempfile

        folder = tempfile.TemporaryDirectory()
        command = [sys.executable, __file__, "serve", f"{folder.name}/socket"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        _server[:] = folder, process
    return [sys.executable, "-S", "-E", __file__, f"{_server[0].name}/socket"]


def put_on_path(folder) -> str:
    """Make the programs in this folder. Returns: the variable PATH with the folder"""
    for name, module in PROGRAMS.items():
        path = os.path.join(folder, name)
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\nexec {" ".join(words())} {module} "$@"\n')
        os.chmod(path, 0o755)
    return os.pathsep.join([str(folder), os.path.dirname(sys.executable), os.environ["PATH"]])


def ask(address: str, arguments: list[str]) -> int:
    """Let the server run a program, and return its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        code = connection.recv(1)
    return code[0] if code else 1  # 1: it was killed


def serve(address: str) -> None:
    import select
    import signal

    # Ended forks are waited for, and not ignored, so that this process's CPU time has theirs (`make durations`).
    signal.signal(signal.SIGCHLD, _wait_for_ended_forks)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return  # the tests have ended
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become_program(connection)
            connection.close()


def _wait_for_ended_forks(*_) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there is none


def become_program(connection: socket.socket) -> None:
    import atexit
    import threading
    import traceback

    import torch

    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 20)
    arguments, environment, folder = json.loads(request)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    code = 1
    try:
        run(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(bytes([code & 255]))
        os._exit(code & 255)


def run(arguments: list[str]) -> None:
    """Run a program as Python's command line does."""
    import runpy
    import types

    kind, *rest = arguments
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]  # [0] is this file's folder
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True) and None
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        source, sys.argv, name = rest[0], ["-c", *rest[1:]], "<string>"
        sys.path.insert(0, "")
    else:
        assert not kind.startswith("-"), f"{kind}: this flag of Python is not known here"
        with open(kind) as file:
            source = file.read()
        sys.argv, name = arguments, os.path.abspath(kind)
        sys.path.insert(0, os.path.dirname(name))
        main.__file__ = name
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
