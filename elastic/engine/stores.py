"""The store in which the members of a world meet: a keeper hosts it, and every value in it is sealed with the
run's secret.

torch's TCPStore asks nobody who he is, and can list its keys: whoever reaches its port may read, write and
delete.  So it listens at one address of its node only, and its values mean nothing to others: a value is
hidden, and has a proof that a process of this run wrote it under this key (HMAC-SHA256, RFC 2104).  That
keeps NCCL's unique id secret, the only thing that NCCL asks of whoever connects.

A stranger who reaches the port can still delete or replace values: then the world does not form, says why,
and the next one has another store.  He also sees the keys, and the numbers of :meth:`SealedStore.add`.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

import torch.distributed as dist

from elastic.errors import WorldBroken

NONCE, PROOF = 16, 32
"""Bytes of a sealed value beside what it hides: before it, and after it."""
BACKLOG = 4096
"""Connections that may wait to be accepted: the members of a world come at the same moment."""


def host_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Returns a store that this process hosts until the store is deleted.  It listens at ``address`` only, at
    a free port.
    """
    listening = socket.create_server((address, 0), backlog=BACKLOG)
    port = listening.getsockname()[1]
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def join_store(address: str, port: int, secret: bytes, timeout_s: float) -> SealedStore:
    """Returns a member's view of the store at ``address``.  Raises ``dist.DistError`` if nobody answers there
    within ``timeout_s``.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    return SealedStore(
        dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout), secret
    )


class SealedStore(dist.Store):
    """A view of ``store`` in which only processes that know ``secret`` can write and read values.

    torch keeps the C++ half of it only, so whoever makes process groups with it must keep it too.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__()
        self._store = store
        self._hides, self._proves = (
            hmac.digest(secret, purpose, "sha256") for purpose in (b"store: hide", b"store: prove")
        )

    def set(self, key: str, value: str | bytes) -> None:
        plain, nonce = value.encode() if isinstance(value, str) else value, secrets.token_bytes(NONCE)
        hidden = self._hide(nonce, plain)
        self._store.set(key, nonce + hidden + self._proof(key, nonce, hidden))  # type: ignore[arg-type] # torch takes bytes too

    def get(self, key: str) -> bytes:
        """Returns the value; waits for it if it is not there yet.  Raises :class:`WorldBroken` if no process
        of this run wrote it.
        """
        self._store.set_timeout(self._timeout)
        found = bytes(self._store.get(key))
        nonce, hidden, proof = found[:NONCE], found[NONCE:-PROOF], found[-PROOF:]
        if not hmac.compare_digest(proof, self._proof(key, nonce, hidden)):
            raise WorldBroken(
                f"the value of {key!r} in the store of this world was written by a process that does "
                "not belong to this run"
            )
        return self._hide(nonce, hidden)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._store.wait(list(keys), timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number.  It is not sealed, since the store itself adds: use it for nothing but to see how
        many have come.
        """
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    @property
    def _timeout(self) -> datetime.timedelta:
        found: datetime.timedelta = self.timeout  # type: ignore[attr-defined] # torch's stubs lack it
        return found

    def _hide(self, nonce: bytes, value: bytes) -> bytes:
        """Returns ``value`` hidden, or what is hidden in it: the exclusive or with bytes that nobody else can
        compute.
        """
        mask = hashlib.shake_256(self._hides + nonce).digest(len(value))
        return (int.from_bytes(value, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(value), "big")

    def _proof(self, key: str, nonce: bytes, hidden: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._proves, len(name).to_bytes(4, "big") + name + nonce + hidden, "sha256")
