"""A ModelSpec from the hub: ``config.json``, else the headers of its safetensors files, through ``huggingface_hub``.

Every way in which the hub can refuse has its own line; nothing waits longer than :data:`PATIENCE` seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.progress import working
from zeroplan.models import catalog
from zeroplan.models.files import read_json
from zeroplan.models.from_config import describable, spec_from_config
from zeroplan.models.spec import ModelSpec

#: Seconds after which a look-up gives up.
PATIENCE = 5.0

_Answer = TypeVar("_Answer")


def spec_from_hub(
    repository: str,
    *,
    token: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool | None = None,
    where: str = "MODEL",
) -> ModelSpec:
    """Describe the model of a repository on the hub (or on the server that ``HF_ENDPOINT`` names).

    Args:
        repository: its id.
        token: None uses the one logged in with.
        revision: a branch, tag or commit.
        trust_remote_code: whether code of the repository may be run to describe an unknown architecture.
        offline: True asks only the local cache; None follows ``HF_HUB_OFFLINE``.
        where: the flag or argument to name in messages.

    Raises:
        BadInput: when the repository is missing, gated or empty, the network is down, or its config is not understood.
    """
    if offline is None:
        offline = any(
            os.environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE")
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        )
    if find_spec("huggingface_hub") is None:  # as in a browser
        what = f"{repository[:100]!r} is not in the catalog, and huggingface_hub is not installed"
        raise BadInput(what, where=where, remedy=catalog.near_names(repository) or "give its config.json")
    asked = _Look(repository, token, revision, offline, where)
    config = asked.config()
    if config is not None and describable(config):
        return spec_from_config(
            config,
            name=repository,
            source="hub",
            where=f"{repository} config.json",
            trust_remote_code=trust_remote_code,
            repository=repository,
            revision=revision,
            token=token,
        )
    shapes = None if offline else asked.shapes()
    if shapes:
        from zeroplan.models.grouping import group_units

        kind = config.get("model_type") if config else None
        return ModelSpec(repository, group_units(shapes), "hub", kind if isinstance(kind, str) else "", config or {})
    if config is not None:
        return spec_from_config(config, name=repository, source="hub", where=f"{repository} config.json")
    raise BadInput(
        f"{repository!r} holds neither a config.json nor safetensors files",
        where=where,
        remedy="give a repository of transformers weights",
    )


class _Look:
    """One look-up: what is asked of the hub, and how its refusals read."""

    def __init__(self, repository: str, token: str | None, revision: str | None, offline: bool, where: str) -> None:
        self.repository, self.token, self.revision = repository, token, revision
        self.offline, self.where = offline, where
        self.endpoint = os.environ.get("HF_ENDPOINT") or None

    def config(self) -> dict[str, Any] | None:
        """The repository's config.json, from the cache when the hub cannot be reached; None when it has none."""
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            path = self._cached() if self.offline else _within(PATIENCE, self._downloaded)
        except LocalEntryNotFoundError as error:
            raise self._refusal(error) from None
        except EntryNotFoundError:
            return None
        except Exception as error:  # of the hub's library, of its HTTP client or of the system, by version
            if self.offline or not _unreachable(error):
                raise self._refusal(error) from None
            try:
                path = self._cached()
            except (EntryNotFoundError, OSError, ValueError):
                raise self._refusal(error) from None
        data = read_json(path, where=self.where)
        if not isinstance(data, dict):
            raise BadInput(f"{self.repository}: config.json holds no object", where=self.where)
        return data

    def _cached(self) -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(self.repository, "config.json", revision=self.revision, local_files_only=True)

    def _downloaded(self) -> str:
        """Asks for the file's metadata first, since that raises at once what the download would retry for half a minute."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        working(f"asking the hub for {self.repository}")
        url = hf_hub_url(self.repository, "config.json", revision=self.revision, endpoint=self.endpoint)
        get_hf_file_metadata(url, token=self.token, timeout=PATIENCE - 1)
        shown = not are_progress_bars_disabled()
        disable_progress_bars()
        try:
            return hf_hub_download(
                self.repository, "config.json", revision=self.revision, token=self.token, endpoint=self.endpoint
            )
        finally:
            if shown:
                enable_progress_bars()

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of all tensors, from the headers of the safetensors files; None when there are none."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        api = HfApi(endpoint=self.endpoint, token=self.token)
        try:
            found = _within(PATIENCE, lambda: api.get_safetensors_metadata(self.repository, revision=self.revision))
        except NotASafetensorsRepoError:
            return None
        except SafetensorsParsingError:
            what = f"{self.repository!r} holds safetensors files with a malformed header"
            raise BadInput(what, where=self.where, remedy="give --params") from None
        except Exception as error:  # as in config()
            raise self._refusal(error) from None
        return {name: tuple(tensor.shape) for file in found.files_metadata.values() for name, tensor in file.tensors.items()}

    def _refusal(self, error: Exception) -> BadInput:
        """Return the error to raise for the hub's: its meaning in one line with the remedy."""
        what, remedy = self._meaning(error, repr(self.repository[:100]), catalog.near_names(self.repository))
        return BadInput(what, where=self.where, remedy=remedy)

    def _meaning(self, error: Exception, name: str, near: str) -> tuple[str, str]:
        """Return what is wrong and what to do about it; `near` names models of the catalog, or is empty."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            link = f"{self.endpoint or 'https://huggingface.co'}/{self.repository}"
            return f"{name} is gated", f"ask for access at {link} and give --token or run 'hf auth login'"
        if isinstance(error, errors.RepositoryNotFoundError):
            remedy = near or "check the id, or give --token if it is private"
            return f"no model {name} in the catalog or on the hub", remedy
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{name} has no revision {str(self.revision)[:60]!r}", "give a branch, tag or commit"
        if isinstance(error, errors.HFValidationError):
            return f"{name} is no model id", near or "write it as organisation/name, or give a path"
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            code = error.response.status_code
            return f"the hub answered {code} for {name}", "check the token" if code in (401, 403) else "try again later"
        unknown = "" if catalog.find(self.repository) else f"{name} is not in the catalog, and "
        if self.offline:
            return f"{unknown}offline, the local cache does not hold it", near or "go online once"
        if _timed_out(error):
            return f"{unknown}the hub did not answer within {PATIENCE:.0f} s", near or "try again, or give a local folder"
        return f"{unknown}the hub cannot be reached", near or "check the network, or give a local folder"


def _timed_out(error: Exception) -> bool:
    """Return whether the error is a timeout: Python's, or one of an HTTP client's, which are no subclasses of it."""
    return any("Timeout" in kind.__name__ for kind in type(error).__mro__)


def _unreachable(error: Exception) -> bool:
    """Return whether the hub gave no answer, or none of its own (a server's fault)."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
    """The answer of `ask`, or TimeoutError after so many seconds (the asking thread is left to die with the process)."""
    answers: list[_Answer] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as fault:  # handed to the caller, whatever it is
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    if faults:
        raise faults[0]
    raise TimeoutError
