"""Settings of TLS, of identities, of the access policy, and of the audit log."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from shalekv.settings.model import Settings


class TlsSettings(Settings):
    """TLS of what this process listens on, and of its connections to safekeepers and etcd."""

    tls_cert: str = Field(
        default="",
        description="PEM file with the certificate of this process and those that lead from it to "
        "its authority. It is shown to clients, and to the safekeepers and the etcd that this "
        "process connects to. All files of TLS are read again when they change.",
        json_schema_extra={"user": "security: encrypts all connections"},
    )
    tls_key: str = Field(
        default="",
        description="PEM file with the private key of --tls-cert, without a password.",
        json_schema_extra={"user": "security: as --tls-cert"},
    )
    tls_client_ca: str = Field(
        default="",
        description="PEM file with the authorities of clients: a connection without a certificate "
        "of one of them is refused. If it has lists of revoked certificates (CRLs) as well, it "
        "must have one of each authority. Not set: clients need no certificate.",
        json_schema_extra={"user": "security: who may connect at all"},
    )
    tls_server_ca: str = Field(
        default="",
        description="PEM file with the authorities of the servers that this process connects to: "
        "safekeepers and etcd. Given without --tls-cert, they are verified, and get no "
        "certificate. Not set: --tls-client-ca, or, if neither is set and --tls-cert is, the "
        "authorities of the system.",
        json_schema_extra={"user": "security: safekeepers of another authority than clients"},
    )

    @property
    def has_certificate(self) -> bool:
        """Return whether this process listens with TLS."""
        return bool(self.tls_cert)

    @property
    def connects_with_tls(self) -> bool:
        """Return whether this process connects to safekeepers with TLS."""
        return bool(self.tls_cert or self.tls_server_ca)

    @model_validator(mode="after")
    def _files_belong_together(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key belong together: give both")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


class AuditLevel(StrEnum):
    """The operations that the audit log has lines of; each level has those before it."""

    DENIED = "denied"
    ADMIN = "admin"
    WRITES = "writes"
    ALL = "all"


class AuditKeys(StrEnum):
    """The ways in which the audit log shows keys."""

    HASHED = "hashed"
    PREFIX = "prefix"
    PLAIN = "plain"


class AccessSettings(Settings):
    """Access control: identities of callers, the access policy, and the audit log."""

    admins: str = Field(
        default="",
        description="Principals, separated by commas, that have the role root whatever the policy "
        "says, such as token:alice or uri:spiffe://example.org/operator. If it is set, and no "
        "policy is stored yet, everybody else is refused from the beginning.",
        json_schema_extra={"user": "security: the first administrator, and the way back in"},
    )
    tokens_file: str = Field(
        default="",
        description="File with the hashes of static tokens, which `shalekv token create` writes. "
        "It is read again when it changes.",
        json_schema_extra={"user": "security: clients that have no certificate"},
    )
    oidc_issuer: str = Field(
        default="",
        description="URL of the OpenID Connect issuer whose JSON web tokens are accepted, with "
        "https.",
        json_schema_extra={"user": "security: clients that get tokens from an identity provider"},
    )
    oidc_audience: str = Field(
        default="",
        description="The audience that a JSON web token must name. Required with --oidc-issuer.",
        json_schema_extra={"user": "security: tokens of other services are refused"},
    )
    oidc_ca: str = Field(
        default="",
        description="PEM file with the authorities of the issuer. Not set: those of the system.",
        json_schema_extra={"user": "security: an issuer with an authority of its own"},
    )
    policy_check_ms: int = Field(
        default=2_000,
        ge=100,
        le=60_000,
        description="Interval between two looks for a newer access policy in the object store, "
        "milliseconds. A change reaches each process within it and the time of one request.",
        json_schema_extra={"user": "security: how soon a change counts, against requests"},
    )
    policy_age_ms_max: int = Field(
        default=60_000,
        ge=1_000,
        le=86_400_000,
        description="Longest time for which a policy that is enforced is used without news from "
        "the object store, milliseconds. After it, calls are refused with UNAVAILABLE.",
        json_schema_extra={"user": "security: bound on a withdrawn right while the store is away"},
    )
    open_services: bool = Field(
        default=True,
        description="Answer health checks and reflection to everybody. If off, they need "
        "credentials once a policy is enforced.",
        json_schema_extra={"user": "security: a port that strangers reach"},
    )
    audit_log: str = Field(
        default="",
        description="File to which the audit log is appended, or `stderr`. It is opened again at "
        "SIGHUP. Not set: there is none.",
        json_schema_extra={"user": "security: who did what"},
    )
    audit_level: AuditLevel = Field(
        default=AuditLevel.ADMIN,
        description="The operations of the audit log: refused ones; administration as well; writes "
        "as well; or all.",
        json_schema_extra={"user": "security: detail against the size of the log"},
    )
    audit_keys: AuditKeys = Field(
        default=AuditKeys.HASHED,
        description="How the audit log shows keys: by a keyed hash, by their first 8 bytes, or "
        "plainly.",
        json_schema_extra={"user": "security: keys that are secrets themselves"},
    )

    @property
    def admin_names(self) -> frozenset[str]:
        """The principals of `admins`."""
        return frozenset(each.strip() for each in self.admins.split(",") if each.strip())

    @property
    def names_callers(self) -> bool:
        """Return whether tokens are accepted, or somebody is an administrator."""
        return bool(self.tokens_file or self.oidc_issuer or self.admins)

    @model_validator(mode="after")
    def _issuer_is_complete(self) -> Self:
        if bool(self.oidc_issuer) != bool(self.oidc_audience):
            raise ValueError("oidc_issuer and oidc_audience belong together: give both")
        return self
