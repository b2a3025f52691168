"""Settings of the election of a writer."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import Settings


class ElectionSettings(Settings):
    """Who tries to be the writer, where several processes stand by."""

    elect: str = Field(
        default="",
        description="Where a lease decides who tries to be the writer: bucket (of the database), "
        "etcd://HOST:PORT,HOST:PORT/name/of/the/key, or kubernetes://NAMESPACE/NAME of a Lease, "
        "where an empty NAMESPACE means that of the pod. Without the lease the server stands by. "
        "Not set: the server opens the database at once, and takes over from whoever has it.",
    )
    lease_ttl_ms: int = Field(
        default=3_000,
        ge=500,
        le=600_000,
        description="A lease that was not renewed for so long may be taken by another process. It "
        "is renewed each third of that. etcd and Kubernetes count whole seconds, and etcd has a "
        "least time of its own.",
    )
    kubernetes_credentials_path: str = Field(
        default="/var/run/secrets/kubernetes.io/serviceaccount",
        description="The folder with token, ca.crt and namespace of a service account, for "
        "--elect kubernetes://. Kubernetes mounts it into each pod; the files are read again when "
        "they change.",
    )
