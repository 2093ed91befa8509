"""The rendezvous store, asked so that nobody waits for ever: one whose host is stopped takes requests and never answers."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

#: Seconds after which a store that does not answer is taken for lost.
ANSWERS_IN = 10.0


class RendezvousStore:
    """Values in JSON under keys with a prefix. Every method raises RuntimeError where the store does not answer.

    Args:
        store: a connection that nothing else uses, as one that waits blocks all its users.
        prefix: of all keys.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._turn = threading.Lock()  # the store serves one request at a time
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._overdue: Future[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="zeroplan-store", daemon=True)

    def set(self, key: str, value: Any) -> None:
        """Sets a value."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", json.dumps(value)))

    def get(self, key: str) -> Any:
        """The value that was set; None if none was."""
        return (self.get_all([key]) or [None])[0]

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of all keys; empty until each of them is set."""
        full = [f"{self._prefix}/{key}" for key in keys]
        found: list[Any] = self._ask(lambda: self._store.multi_get(full) if self._store.check(full) else [])
        return [json.loads(text) for text in found]

    def close(self) -> None:
        """Ends the thread, after which no request is answered."""
        self._is_closed = True
        self._requests.put(None)

    def _ask(self, act: Callable[[], Any]) -> Any:
        with self._turn:
            if self._is_closed or (self._overdue is not None and not self._overdue.done()):
                raise RuntimeError("the rendezvous store does not answer")
            if not self._thread.is_alive():
                self._thread.start()
            answer: Future[Any] = Future()
            self._requests.put((act, answer))
            try:
                return answer.result(ANSWERS_IN)
            except TimeoutError:
                self._overdue = answer
                raise RuntimeError("the rendezvous store does not answer") from None

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            act, answer = request
            try:
                answer.set_result(act())
            except BaseException as fault:  # the asking thread raises it
                answer.set_exception(fault)
            del request, act, answer
