"""Containers of docker/ write to volumes that the user of their image may write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from tests.kit.compose_file import (
    COMPOSE,
    DOCKER,
    MINIO,
    OBSERVABILITY,
    TLS,
    Service,
    read_compose,
    read_files,
)
from tests.kit.dockerfile import Image, read_dockerfile
from tests.style.test_docker import EXAMPLE, SCRIPTS

FILES: tuple[tuple[str, ...], ...] = ((), (MINIO,), (TLS,), (OBSERVABILITY,))  # beside compose.yaml
IMAGES = ("Dockerfile", "minio.Dockerfile")


def built() -> Iterator[tuple[Service, Image]]:
    """The services of all files whose images are built here, each with its image."""
    for more in FILES:
        for service in read_compose(EXAMPLE, *more).values():
            if service.dockerfile:
                yield service, read_dockerfile(Path(service.dockerfile).name)


def written_by(*more: str) -> list[str]:
    """The volumes of all services, once for each that may write to it."""
    return [name for each in read_compose(EXAMPLE, *more).values() for name in each.written_volumes]


def test_mount_points_belong_to_the_user() -> None:
    """A new volume takes over the owner and the mode of its mount point in the image."""
    mounted = [(service, image, point) for service, image in built() for point in service.volumes]
    assert mounted
    for service, image, point in mounted:
        assert point in image.folders, f"{service.name}: {point} would belong to root"
        folder = image.folders[point]
        assert (folder.uid, folder.gid) == image.user, service.name
        assert folder.mode & 0o700 == 0o700, service.name


def test_nothing_is_written_elsewhere() -> None:
    """The rest of a container is read-only, but for /tmp: paths of commands are in a volume."""
    for service, image in built():
        assert service.text["read_only"] is True
        assert service.text["tmpfs"] == ["/tmp"]
        for word in [*image.entrypoint, *service.argv]:
            if word.startswith("/") and not word.startswith(SCRIPTS):
                above = {word, *map(str, PurePosixPath(word).parents)}
                assert above & set(service.volumes), f"{service.name}: {word}"


def test_each_volume_has_one_user() -> None:
    """Declared volumes are used, used ones are declared, and no two containers write to one."""
    for more in FILES:
        services, declared = read_compose(EXAMPLE, *more), set(read_files(*more)["volumes"])
        written = written_by(*more)
        assert len(set(written)) == len(written)
        assert {name for each in services.values() for name in each.volumes.values()} <= declared
        assert set(written) == declared - ({"s3"} if MINIO in more else set())
    own = yaml.safe_load((DOCKER / MINIO).read_text())
    assert set(own["services"]) <= set(read_files()["services"]), f"{COMPOSE} has others"


@pytest.mark.parametrize("name", IMAGES)
def test_folders_are_made_before_the_user_changes(name: str) -> None:
    """Root makes the folders, and nothing is done as root at run time."""
    words = [word for word, _ in read_dockerfile(name).last_stage.instructions]
    assert words.index("RUN") < words.index("USER")
    assert words.count("RUN") == 1


def test_folders_of_the_image_are_explained() -> None:
    """docker/README.md has the mount points, for users who run the image without Compose."""
    readme = (DOCKER / "README.md").read_text()
    assert [
        path for path in read_dockerfile("Dockerfile").folders if f"`{path}`" not in readme
    ] == []
