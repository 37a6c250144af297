"""Asks the head of a Ray cluster from outside whether it answers, and whether an actor lives there.

Ray itself tries for minutes, with warnings of its own, to join a head that accepts connections and says
nothing: a frozen one, or another program at its port.  So a command asks here first, and joins a cluster only
if its head has answered.
"""

from __future__ import annotations

import socket
from typing import Any

import ray

from elastic.errors import ClusterGone, Refused

ANSWER_S = 15.0
"""Seconds in which a head must answer.  It takes milliseconds, and a few seconds on a machine that is
overloaded.
"""

ELSEWHERE = (
    "train on another cluster (`elastic train --address HOST:PORT`, or `--address local` for this "
    "machine): a run goes on there from its newest checkpoint"
)
UNASKED = object()
"""The reply that stands for a head that could not be asked, because this version of Ray has other private
calls, or whose answer was an unexpected error.  Ray finds out when it joins the cluster.
"""


def reachable(address: str) -> bool:
    """Returns whether somebody accepts connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        # an IPv6 address stands in brackets
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError, OverflowError):  # the last two: the port is not valid
        return False
    return True


def answers(address: str) -> bool:
    """Returns whether the head of a Ray cluster answers at ``host:port``: False if nobody listens there, or
    another program does.

    Raises :class:`ClusterGone` if somebody accepts the connection and says nothing for ``ANSWER_S``, and
    :class:`Refused` if the head refuses this process: runs may live there.
    """
    return _reply(address, "NodeInfo", "CheckAlive") is not None


def has_actor(address: str, name: str, namespace: str) -> bool:
    """Returns whether the cluster at ``address`` has a living actor of that name, without joining it.  Raises
    as :func:`answers`.
    """
    reply = _reply(address, "ActorInfo", "GetNamedActorInfo", name=name, ray_namespace=namespace)
    return reply is not None and (reply is UNASKED or reply.status.code == 0)


def _reply(address: str, service: str, method: str, **request: str) -> Any:
    """Returns what the head replies, None if no head answers, or ``UNASKED`` if this version of Ray cannot be
    asked in this way.  Raises as :func:`answers`.
    """
    if not reachable(address):
        return None
    try:
        import grpc
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    except ImportError:
        return UNASKED
    try:
        with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            stub = getattr(gcs_service_pb2_grpc, f"{service}GcsServiceStub")(channel)
            return getattr(stub, method)(
                getattr(gcs_service_pb2, f"{method}Request")(**request), timeout=ANSWER_S
            )
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ClusterGone(
                f"the head of the Ray cluster at {address} accepts connections, but has not answered for "
                f"{ANSWER_S:g} s: it is frozen or overloaded, or another program listens there; restart "
                f"that cluster, or {ELSEWHERE}"
            ) from None
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            return None
        if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return UNASKED
        why = error.details()
    # it has no token, or not what TLS needs
    except (ray.exceptions.AuthenticationError, RuntimeError, OSError) as error:
        why = str(error).partition(". ")[0]
    raise Refused(
        f"the head of the Ray cluster at {address} refuses this process, so this command cannot see "
        f"which runs live there ({why}): set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or "
        f"~/.ray/auth_token) as the cluster was started with them, or {ELSEWHERE}"
    )
