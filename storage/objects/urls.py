"""Decides which backend serves a URL and which text names a folder, for settings and stores alike.

A URL is ``scheme://…``.  Text that only resembles a URL (``s3:/bucket``, ``s4://bucket``) would name an
unintended folder, or nothing, and is refused.
"""

from __future__ import annotations

import difflib
import re

BACKENDS = {
    "file": "storage.objects.folder:Folder",
    "memory": "storage.objects.memory:Memory",
    "s3": "storage.objects.s3:S3",
}
"""Scheme -> class of its store, imported when the first URL of that scheme is opened.  A new backend is a row
here.
"""

OTHERS = "storage.objects.fsspec:Fsspec"
"""The class that serves every other scheme that fsspec knows."""


def backend_of(url: str) -> str:
    """Returns the class of the store at ``url``, as ``module:name``.  Raises :class:`ValueError` as
    :func:`folder_of` does.
    """
    if folder_of(url) is not None:
        return BACKENDS["file"]
    return BACKENDS.get(url.partition("://")[0], OTHERS)


def folder_of(place: str) -> str | None:
    """Returns the folder that ``place`` names (``/data``, ``data``, ``file:///data``), or None if it is a URL
    of another scheme.

    Raises :class:`ValueError`, which says what to write instead, if ``place`` is neither.
    """
    scheme, colon, rest = place.partition("://")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        if scheme == "file" and not rest.startswith("/"):
            raise ValueError(f"must name its folder by an absolute path: 'file:///{rest}'")
        if scheme not in BACKENDS:
            _check_known(scheme, rest)
        return rest if scheme == "file" else None
    first = place.partition("/")[0]
    if ":" in first or (first in BACKENDS and place.startswith(f"{first}//")):
        raise ValueError(
            f"must be a folder or a URL: write '{_meant(place)}', or './{place}' for a folder of that name"
        )
    return place


def _meant(place: str) -> str:
    """Returns the URL that was probably meant: the scheme is right, its colon and slashes are not."""
    scheme, rest = re.fullmatch(r"[:/ ]*([^:/ ]*)[:/ ]*(.*)", place, re.DOTALL).groups()  # type: ignore[union-attr] # it matches all there is
    if scheme not in BACKENDS or not rest:
        return "s3://bucket/prefix"
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def _check_known(scheme: str, rest: str) -> None:
    """Raises :class:`ValueError` if fsspec does not know the scheme.  fsspec is imported only here: most jobs
    do not need it.
    """
    from fsspec import available_protocols

    known = set(available_protocols())
    if scheme not in known:
        near = difflib.get_close_matches(scheme.lower(), [*BACKENDS, *sorted(known)], 1, 0.5)
        hint = (
            f"did you mean '{near[0]}://{rest}'?"
            if near
            else ("use a folder, or a URL such as s3://bucket/prefix")
        )
        raise ValueError(f"has an unknown scheme; {hint}")
