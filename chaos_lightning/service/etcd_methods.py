"""Lists the requests that clients send to etcd, each with its gRPC method and the type of its reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chaos_lightning.service import etcd_pb2 as pb

if TYPE_CHECKING:  # who calls imports it, after channel.py has set its environment
    import grpc

ATTEMPT_S = 1.0
"""Seconds after which a server that does not answer is left for the next one."""
METHODS: dict[Any, tuple[str, Any]] = {
    pb.RangeRequest: ("KV/Range", pb.RangeResponse),
    pb.TxnRequest: ("KV/Txn", pb.TxnResponse),
    pb.CompactionRequest: ("KV/Compact", pb.CompactionResponse),
    pb.StatusRequest: ("Maintenance/Status", pb.StatusResponse),
    pb.LeaseGrantRequest: ("Lease/LeaseGrant", pb.LeaseGrantResponse),
    pb.LeaseRevokeRequest: ("Lease/LeaseRevoke", pb.LeaseRevokeResponse),
    pb.LeaseKeepAliveRequest: ("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse),
    pb.WatchRequest: ("Watch/Watch", pb.WatchResponse),
    pb.AuthenticateRequest: ("Auth/Authenticate", pb.AuthenticateResponse),
}
"""Path of the method, and its reply, by kind of request."""
STREAMED = (pb.LeaseKeepAliveRequest, pb.WatchRequest)
"""Requests whose methods stream both ways."""


def method(channel: grpc.Channel, request: Any) -> Any:
    """Returns gRPC's callable for a kind of request to etcd."""
    path, reply = METHODS[request]
    make = channel.stream_stream if request in STREAMED else channel.unary_unary
    return make(
        f"/etcdserverpb.{path}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )
