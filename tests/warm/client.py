"""Asks the server for an interpreter and stands for it: its signals go there, its exit code comes from there.

The test session puts the server's address before these lines and makes them a program. It imports next to nothing, since it is
started in place of an interpreter each time.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str) -> None:
    """Wait until the interpreter has ended, and end in the same way. If this process is killed, the server kills the other."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        asked = {"words": sys.argv[1:], "program": sys.argv[0], "folder": os.getcwd(), "environment": dict(os.environ)}
        text = json.dumps(asked).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(text)
        pid = int.from_bytes(server.recv(4), "big")
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = server.recv(4)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else -signal.SIGKILL
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
