"""Asks the head of a Ray cluster from outside whether it answers, and whether an actor lives there.

Ray itself tries for minutes, with warnings of its own, to join a head that accepts connections and says nothing: a frozen one, or another
program at its port.  So a command asks here first, and joins a cluster only if its head has answered.
"""

from __future__ import annotations

import socket

import ray

from elastic.errors import ClusterGone

ANSWER_S = 15.0
"""Seconds in which a head must answer.  It takes milliseconds, and a few seconds on a machine that is overloaded."""


def reachable(address: str) -> bool:
    """Returns whether somebody accepts connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()  # an IPv6 address stands in brackets
    except (OSError, ValueError, OverflowError):  # the last two of a port that is none
        return False
    return True


def answers(address: str) -> bool:
    """Returns whether the head of a Ray cluster answers at ``host:port``: False if nobody listens there, or another program does.

    Raises :class:`ClusterGone` if somebody accepts the connection and says nothing for ``ANSWER_S``: runs may live there.
    """
    if not reachable(address):
        return False
    try:
        import grpc
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    except ImportError:  # private; who joins finds out
        return True
    try:
        with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ANSWER_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ClusterGone(
                f"the head of the Ray cluster at {address} accepts connections, but has not answered for {ANSWER_S:g} s: it is frozen or "
                f"overloaded, or another program listens there; restart that cluster, or train on another one (`elastic train --address "
                f"HOST:PORT`, or `--address local` for this machine), where a run goes on from its newest checkpoint"
            ) from None
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
    except (ray.exceptions.AuthenticationError, RuntimeError, OSError):  # it has no token, or not what TLS needs; who joins is told so
        return True
    return True


def has_actor(address: str, name: str) -> bool:
    """Returns whether the cluster at ``address`` has a living actor of that name, without joining it.  Raises as :func:`answers`."""
    if not answers(address):
        return False
    try:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]
    except ImportError:  # private; who joins finds out
        return True
    head = GlobalState()
    try:
        head._initialize_global_state(GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False))
        return any(each["Name"] == name and each["State"] != "DEAD" for each in head.actor_table(None).values())
    except Exception:  # Ray's own, of a cluster of somebody else, or of a head that has gone since
        return False
    finally:
        head.disconnect()
