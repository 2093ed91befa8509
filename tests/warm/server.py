"""Forks interpreters that have already imported what most scripts of the tests import.

An interpreter of its own takes five seconds to import torch and transformers; one that is forked here takes none. A client
(:mod:`tests.warm.client`) hands over its words, environment, folder and standard streams; the child takes them and goes on as
``python WORDS`` would, with its ``PYTHONPATH`` and ``sitecustomize``, and starts further interpreters in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import selectors
import signal
import site
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

#: What takes long to import. Neither DeepSpeed nor Lightning: the runtime looks whether they are there.
PRELOADED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "zeroplan.cli.main",
    "zeroplan.validate.rank.worker",
    "zeroplan_runtime",
)
#: Programs beside ``python``, by the module that each one runs.
PROGRAMS = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "deepspeed": "deepspeed.launcher.runner",
}
#: A child's words take the place of the server's where other processes look them up, so the server's are longer.
_PADDING = "." * 4000
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, session: int) -> Path:
    """The program that stands for an interpreter; several processes may ask for the same one.

    Args:
        folder: an empty folder, or one that was given before; the programs are made in it.
        session: a process. The server ends with it.
    """
    folder.mkdir(exist_ok=True)
    program, address = folder / "python", folder / "address"
    with (folder / "lock").open("w") as lock, (folder / "said").open("a") as said:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            code = "import sys; from tests.warm.server import main; main(*sys.argv[1:3])"
            command = [sys.executable, "-c", code, str(address), str(session), _PADDING]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            server = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            while not address.exists():  # the tests' time limits begin when all is imported
                assert server.poll() is None, (folder / "said").read_text()
                time.sleep(0.02)
            client = Path(__file__).with_name("client.py").read_text()
            program.write_text(f"#!{sys.executable} -SE\n{client}\n\nmain({str(address)!r})\n")
            program.chmod(0o755)
            for name in PROGRAMS:
                (folder / name).symlink_to(program)
    return program


class _Server:
    """Clients' connections and their children. A child of its own process leaves :meth:`serve` with what it is to run."""

    def __init__(self, address: str, session: int) -> None:
        self.session = os.pidfd_open(session)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.woken, self.waker = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        for readable in (self.session, self.listener, self.woken):
            self.selector.register(readable, selectors.EVENT_READ)
        self.children: dict[socket.socket, int | None] = {}

    def serve(self) -> dict[str, Any] | None:
        self.waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno())
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == self.session:
                    for pid in filter(None, self.children.values()):
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    connection = self.listener.accept()[0]
                    self.selector.register(connection, selectors.EVENT_READ)
                    self.children[connection] = None
                elif key.fileobj is self.woken:
                    self.woken.recv(4096)
                    self._report_ends()
                elif (asked := self._hear(key.fileobj)) is not None:
                    return asked

    def _hear(self, connection: Any) -> dict[str, Any] | None:
        text, streams = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            head, streams, *_ = socket.recv_fds(connection, 4, 3)
            size = int.from_bytes(head, "big")
            while len(text) < size and (part := connection.recv(size - len(text))):
                text += part
        if not text:  # the client has ended, and so does its interpreter
            self.selector.unregister(connection)
            connection.close()
            if (pid := self.children.pop(connection)) is not None:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if pid:
            self.children[connection] = pid
            with contextlib.suppress(ConnectionError):  # a client that has ended is heard of next
                connection.sendall(pid.to_bytes(4, "big"))
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for ours in (self.selector, self.listener, self.woken, self.waker, *self.children):
                ours.close()
            os.close(self.session)
        for stream in streams:
            os.close(stream)
        return None if pid else json.loads(text)

    def _report_ends(self) -> None:
        for connection, pid in self.children.items():
            if pid is not None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self.children[connection] = None
                with contextlib.suppress(ConnectionError):
                    connection.sendall(ended[1].to_bytes(4, "big"))


def _become(asked: dict[str, Any], libraries: list[str]) -> None:
    """Run what an interpreter with those words would run."""
    folder, environment, words = asked["folder"], asked["environment"], list(asked["words"])
    program = Path(asked["program"])
    if program.name in PROGRAMS:
        words = ["-m", PROGRAMS[program.name], *words]
    _show((str(program.with_name("python")), *words))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(program.with_name("python"))
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *libraries]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    safe = False
    while words[0] in ("-u", "-B", "-P"):
        safe |= words.pop(0) == "-P"
    main = types.ModuleType("__main__")
    if words[0] == "-c":
        code = compile(words[1], "<string>", "exec")
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
    elif words[0] == "-m":
        code, main.__spec__, main.__file__ = _module(words[1])
        main.__package__ = main.__spec__.parent
        sys.argv[:] = [main.__file__, *words[2:]]
        if not safe:
            sys.path.insert(0, folder)
    else:
        main.__file__ = str(Path(words[0]).absolute())
        code = compile(Path(words[0]).read_bytes(), main.__file__, "exec")
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _module(name: str) -> tuple[types.CodeType, ModuleSpec, str]:
    """What ``python -m name`` runs. :mod:`runpy` would do as well, but torchrun looks up the module of each frame again and
    again, which is slow for frames that have none.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None, name
    loader: Any = spec.loader  # an editable install's has get_code without being an InspectLoader
    code = loader.get_code(spec.name)
    assert code is not None
    return code, spec, str(spec.origin)


def _show(words: Sequence[str]) -> None:
    """Make these the words of this process that ``ps`` shows."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[45:47])
    ctypes.memmove(first, "\0".join(words).encode()[: end - first - 1].ljust(end - first, b"\0"), end - first)


def main(address: str, session: str) -> None:
    given = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    libraries = [entry for entry in sys.path[1:] if entry not in given]
    for name in PRELOADED:
        importlib.import_module(name)
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # It reads the source of every frame's module to name one function in an event that nobody records.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    gc.freeze()  # else each child goes through all that is imported when it ends
    asked = _Server(address, int(session)).serve()
    if asked is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _become(asked, libraries)
