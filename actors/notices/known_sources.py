"""The sources of notices by name, and those that a job watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from actors.notices.aws import Aws
from actors.notices.azure import Azure
from actors.notices.drain import Drain
from actors.notices.gcp import Gcp
from actors.notices.port import ClusterSource, NoticeSource
from actors.notices.sigterm import Sigterm
from actors.notices.told import NoticeCommand, NoticeFile
from elastic.code.imports import did_you_mean, failure, load
from elastic.config.sections import Notices
from elastic.errors import CodeError

AUTO = "auto"
DMI = Path("/sys/class/dmi/id")
"""The folder in which Linux says who has made this machine."""
AZURE = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of Azure's machines; other machines of Microsoft's hypervisor have none, or another."""

Fits = Callable[[Notices], bool]
SOURCES: Mapping[str, tuple[Callable[[Notices], NoticeSource], Fits]] = {
    "aws": (Aws, lambda _: "Amazon" in _dmi("sys_vendor") or "amazon" in _dmi("bios_version")),
    "gcp": (Gcp, lambda _: _dmi("product_name") == "Google Compute Engine"),
    "azure": (Azure, lambda _: _dmi("chassis_asset_tag") == AZURE),
    "sigterm": (Sigterm, lambda _: False),
    "file": (NoticeFile, lambda settings: bool(settings.file)),
    "command": (NoticeCommand, lambda settings: bool(settings.command)),
}
"""The sources of one machine that have a short name: how each is made, and whether ``auto`` takes it there."""
CLUSTER_SOURCES: Mapping[str, Callable[[Notices], ClusterSource]] = {"drain": Drain}
"""The sources of a whole cluster, all of which ``auto`` takes."""


def check_sources(settings: Notices) -> None:
    """Raises :class:`CodeError` if there is no source of a name in ``notices.sources``."""
    for name in settings.sources:
        if name != AUTO and name not in CLUSTER_SOURCES:
            _maker(name)


def open_sources(settings: Notices) -> dict[str, NoticeSource]:
    """Returns the sources of a job on this machine, by name.  Must be called on the main thread.

    Raises :class:`CodeError` for a source that cannot be made.
    """
    names = dict[str, None]()
    for each in settings.sources:
        found = [name for name, (_, fits) in SOURCES.items() if fits(settings)] if each == AUTO else [each]
        names |= dict.fromkeys(found)
    return {name: _made(name, settings) for name in names if name not in CLUSTER_SOURCES}


def open_cluster_sources(settings: Notices) -> dict[str, ClusterSource]:
    """Returns the sources of a job that speak of the whole cluster, by name."""
    return {
        name: maker(settings)
        for name, maker in CLUSTER_SOURCES.items()
        if name in settings.sources or AUTO in settings.sources
    }


def _maker(name: str) -> Callable[[Notices], NoticeSource]:
    if ":" in name:
        made: Callable[[Notices], NoticeSource] = load(name, "notices.sources")
        lacks = [
            each for each in ("look", "left", "every_s") if isinstance(made, type) and not hasattr(made, each)
        ]
        if not callable(made) or lacks:
            what = f"has no {lacks[0]}" if lacks else "is no class"
            raise CodeError(
                f"notices.sources = {name!r} {what}; name a class that inherits actors.notices.port:NoticeSource"
            )
        return made
    if name not in SOURCES:
        all_names = [AUTO, *SOURCES, *CLUSTER_SOURCES]
        hint = f"use {', '.join(all_names)}, or your own class as 'package.module:Class'"
        raise CodeError(f"notices.sources has no {name!r}; {hint}{did_you_mean(name, all_names)}")
    return SOURCES[name][0]


def _made(name: str, settings: Notices) -> NoticeSource:
    maker = _maker(name)
    try:
        return maker(settings)
    except Exception as error:  # whatever the user's source raises while it is made
        raise CodeError(f"notices.sources = {name!r} cannot be opened: {failure(error)}") from error


def _dmi(key: str) -> str:
    try:
        return (DMI / key).read_text(errors="replace").strip()
    except OSError:  # a machine without such a table
        return ""
