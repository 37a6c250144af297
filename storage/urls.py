"""What names a folder and what a URL: decided here, for settings and stores alike.

A URL is ``scheme://…``.  What only looks like one (``s3:/bucket``, ``s4://bucket``) would be a folder of that name, or nothing at all,
and is refused.
"""

from __future__ import annotations

import difflib
import re

OURS = ("file", "memory", "s3")
"""Schemes that need no look at what else fsspec knows."""


def folder_of(place: str) -> str | None:
    """The folder that ``place`` names (``/data``, ``data``, ``file:///data``); None for a URL of something else.

    Raises :class:`ValueError`, with what to write instead, for what is neither.
    """
    scheme, colon, rest = place.partition("://")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        if scheme == "file" and not rest.startswith("/"):
            raise ValueError(f"must name its folder by an absolute path: 'file:///{rest}'")
        if scheme not in OURS:
            _check_known(scheme, rest)
        return rest if scheme == "file" else None
    first = place.partition("/")[0]
    if ":" in first or (first in OURS and place.startswith(f"{first}//")):
        raise ValueError(f"must be a folder or a URL: write '{_meant(place)}', or './{place}' for a folder of that name")
    return place


def _meant(place: str) -> str:
    """The URL that was probably meant: the scheme is there, its colon and slashes are not as they should be."""
    scheme, rest = re.fullmatch(r"[:/ ]*([^:/ ]*)[:/ ]*(.*)", place, re.DOTALL).groups()  # type: ignore[union-attr] # it matches all there is
    if scheme not in OURS or not rest:
        return "s3://bucket/prefix"
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def _check_known(scheme: str, rest: str) -> None:
    from fsspec import available_protocols

    known = set(available_protocols())
    if scheme not in known:
        near = difflib.get_close_matches(scheme.lower(), [*OURS, *sorted(known)], 1, 0.5)
        hint = f"did you mean '{near[0]}://{rest}'?" if near else "use a folder, or a URL such as s3://bucket/prefix"
        raise ValueError(f"must have a scheme that is known; {hint}")
