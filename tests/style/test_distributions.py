"""The two distributions, `shalekv` and `shalekv-client`, have one version and one licence."""

from __future__ import annotations

import tomllib

import shalekv_client
from shalekv.version import VERSION
from tests.style.sources import ROOT, file_names

CLIENT = "clients/python"
PROJECT, CLIENT_PROJECT = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for folder in (".", CLIENT)
)


def test_both_have_one_version() -> None:
    """Both projects and their code name one version, and the server requires that of the client."""
    version = PROJECT["version"]
    assert (CLIENT_PROJECT["version"], VERSION, shalekv_client.__version__) == (version,) * 3
    assert f"shalekv-client=={version}" in PROJECT["dependencies"]


def test_both_have_one_licence() -> None:
    """A build takes files of its own folder alone, so each has the licence, word for word."""
    assert (ROOT / CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_their_common_package_is_a_namespace() -> None:
    """A module in the package itself would hide all modules of the other distribution."""
    assert [n for n in file_names() if n.endswith("/shalekv/__init__.py")] == []
