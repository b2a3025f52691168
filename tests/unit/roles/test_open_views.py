"""Views that are kept for next pages: how many, and for how long."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.engine.view import OpenView, View
from shalekv.errors import PageExpired
from shalekv.roles.open_views import OpenViews
from shalekv.settings import LimitSettings
from tests.sim.run import simulate
from tests.sim.world import World

TTL_MS = 1_000


def view(seq: int) -> OpenView:
    """A view of its own."""
    return OpenView(View(seq, None, ()), now_ms=0)


def views_of(count_max: int = 3, seed: int = 1) -> OpenViews:
    """Nothing is kept yet."""
    limits = LimitSettings(scan_view_count_max=count_max, scan_view_ttl_ms=TTL_MS)
    return OpenViews(limits, Random(seed))


def kept(views: OpenViews, *ids: int) -> list[bool]:
    """Which of these are still kept."""
    return [_is_kept(views, view_id) for view_id in ids]


def _is_kept(views: OpenViews, view_id: int) -> bool:
    try:
        views.find(view_id)
    except PageExpired:
        return False
    return True


async def test_view_is_found_by_its_id() -> None:
    """Each view is found as it was, under an id that no other has."""
    views = views_of()
    ids = [views.keep(view(seq)) for seq in range(3)]
    assert len(set(ids)) == 3
    assert [views.find(view_id).view.seq for view_id in ids] == [0, 1, 2]
    views.close()


async def test_ids_of_another_process_are_strange() -> None:
    """An id is not guessed: one that another process gave out finds nothing here."""
    views, others = views_of(seed=1), views_of(seed=2)
    views.keep(view(1))
    assert kept(views, others.keep(view(1))) == [False]
    views.close()
    others.close()


def test_view_is_kept_for_its_time_after_each_use() -> None:
    """To the last millisecond after the last use, and then let go without being asked for."""

    async def main(world: World) -> None:
        views = views_of()
        first, second = views.keep(view(1)), views.keep(view(2))
        await world.sleep_ms(TTL_MS - 1)
        assert kept(views, first, second) == [True, True]
        assert views.keep(views.find(first), first) == first
        await world.sleep_ms(1)
        assert kept(views, first, second) == [True, False]
        assert len(views) == 1
        await world.sleep_ms(TTL_MS - 2)
        assert kept(views, first) == [True]
        await world.sleep_ms(1)
        assert len(views) == 0

    simulate(1, main)


def test_finding_is_no_use() -> None:
    """Only what is kept again lives longer."""

    async def main(world: World) -> None:
        views = views_of()
        view_id = views.keep(view(1))
        await world.sleep_ms(TTL_MS - 1)
        views.find(view_id)
        await world.sleep_ms(1)
        assert kept(views, view_id) == [False]

    simulate(1, main)


async def test_view_that_was_used_longest_ago_goes() -> None:
    """Beyond the maximum it makes room; one that is in use stays."""
    views = views_of(3)
    a, b, c = (views.keep(view(seq)) for seq in range(3))
    views.keep(views.find(a), a)
    d = views.keep(view(4))
    assert kept(views, a, b, c, d) == [True, False, True, True]
    e = views.keep(view(5))
    assert kept(views, a, c, d, e) == [True, False, True, True]
    assert len(views) == 3
    views.close()


async def test_keeping_again_takes_no_place() -> None:
    """At the maximum a view that is used again drives out no other."""
    views = views_of(2)
    a, b = views.keep(view(1)), views.keep(view(2))
    views.keep(views.find(a), a)
    assert kept(views, a, b) == [True, True]
    views.close()


async def test_view_that_was_driven_out_while_it_was_read_is_kept_again() -> None:
    """A page that ends after its view had to go still gives a token that works."""
    views = views_of(1)
    a = views.keep(view(1))
    held = views.find(a)
    b = views.keep(view(2))
    views.keep(held, a)
    assert kept(views, a, b) == [True, False]
    views.close()


async def test_error_says_what_to_do() -> None:
    """It names both settings, and that the scan is begun again."""
    with pytest.raises(PageExpired, match=r"1000 ms of scan_view_ttl_ms.*7 of scan_view_count_max"):
        views_of(7).find(1)
