"""The versions that ``verify`` plans: those of the packages that it runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from zeroplan.core.errors import BadInput
from zeroplan.core.versions import parse_version, version_text
from zeroplan.engines.registry import find_engine
from zeroplan.run.ask import Ask


def at_installed(request: Ask) -> Ask:
    """Return the request with the version of the engine's package that is installed here, by which it is then planned.

    Raises:
        BadInput: another version is asked for, or the package is not installed.
    """
    _require_installed("transformers", request.transformers_version, "--transformers-version")
    package, where = find_engine(request.engine).package, "--deepspeed-version"
    if not package:
        return request
    asked = request.deepspeed_version
    if asked is not None:
        from zeroplan.interop.deepspeed_version import asked_version

        asked, _ = asked_version(asked)
    return request.replace(deepspeed_version=_require_installed(package, asked, where))


def _require_installed(package: str, asked: str | None, where: str) -> str | None:
    """Return the installed version of a package; None where the package is missing and no version is asked for.

    Raises:
        BadInput: another version is asked for.
    """
    try:
        here = version_text(parse_version(version(package), where))
    except PackageNotFoundError:
        here = None  # whoever imports it says so
    if asked is not None and here != version_text(parse_version(asked, where)):
        what = f"{package} {here} is installed here and would run" if here else f"{package} is not installed here"
        raise BadInput(what, where=where, remedy=f"leave it out, or install {package} {asked}")
    return here
