from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tapes_of_our_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tapes traced by earlier versions lie in the user's cache; these tests trace their own, once a session."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
