"""The election by a Lease of Kubernetes: its contents, its holders, and lost replies."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest

from shalekv.server.election.elector import Elector
from tests.kit.seeds import random_of
from tests.kit.steady_loop import loop_s
from tests.kit.timeouts import until
from tests.servers.kubernetes import NAMESPACE, KubernetesApi
from tests.stores.elections import LEASE, in_kubernetes
from tests.stores.kubernetes_terms import (
    LONG_MS,
    SHORT_MS,
    TTL_MS,
    elector,
    holder_of,
    kept,
    renewals,
    requests,
)

MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
IDENTITY = re.compile(r"a:1_[0-9a-f]{32}")
FOREIGN = {"holderIdentity": "controller-7d4b_1f", "leaseDurationSeconds": 1}


# Contents of a Lease.


async def test_a_lease_has_the_fields_that_other_programs_read(kubernetes: KubernetesApi) -> None:
    """Holder, duration, times and changes of hands, over a renewal, a release and a take-over; what
    others have written beside them stays.
    """
    async with elector(kubernetes, ttl_ms=2_400) as first, elector(kubernetes, "b:2") as second:
        term = await first.campaign()
        taken = kubernetes.lease(LEASE)["spec"]
        assert IDENTITY.fullmatch(taken["holderIdentity"])
        assert (taken["leaseDurationSeconds"], taken["leaseTransitions"]) == (3, 0)
        assert taken["acquireTime"] == taken["renewTime"]
        assert MICRO_TIME.fullmatch(taken["renewTime"])
        kubernetes.put(LEASE, taken, {"team": "storage"})
        async with kept(term):
            await renewals(kubernetes, 1)
        renewed = kubernetes.lease(LEASE)
        assert renewed["spec"] == {**taken, "renewTime": renewed["spec"]["renewTime"]}
        await term.resign()
        released = kubernetes.lease(LEASE)["spec"]
        assert (released["holderIdentity"], released["leaseDurationSeconds"]) == ("", 1)
        await second.campaign()
        assert kubernetes.lease(LEASE)["spec"]["leaseTransitions"] == 1
        assert kubernetes.lease(LEASE)["metadata"]["labels"] == {"team": "storage"}


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": "", "leaseDurationSeconds": 3_600}])
async def test_a_lease_without_a_holder_is_free(
    kubernetes: KubernetesApi, spec: dict[str, Any]
) -> None:
    """Such as one that was created by hand, or that another program has released."""
    kubernetes.put(LEASE, spec)
    async with elector(kubernetes) as made:
        await made.campaign()
    assert IDENTITY.fullmatch(holder_of(kubernetes))


async def test_the_namespace_may_be_that_of_the_pod(kubernetes: KubernetesApi) -> None:
    """An empty one is read from the files of the service account."""
    election = replace(in_kubernetes(kubernetes), elect=f"kubernetes:///{LEASE}")
    async with election.electors("a:1") as ((made,), _):
        await made.campaign()
    assert list(kubernetes.leases) == [(NAMESPACE, LEASE)]


# Time, and other holders.


async def test_no_clock_of_another_machine_matters(kubernetes: KubernetesApi) -> None:
    """A holder whose clock is decades off, of another program too, keeps its lease while it renews
    it, and loses it once it has not done so for as long as the lease lasts.
    """

    async def outlive(year: int) -> None:
        name = f"of-{year}"
        renewed, again = (f"{year}-01-01T00:00:0{second}.000000Z" for second in (0, 1))
        kubernetes.put(name, {**FOREIGN, "renewTime": renewed})
        election = replace(in_kubernetes(kubernetes), elect=f"kubernetes://{NAMESPACE}/{name}")
        async with (
            election.electors("a:1", ttl_ms=LONG_MS) as ((made,), reported),
            asyncio.TaskGroup() as tasks,
        ):
            campaign = tasks.create_task(made.campaign())
            await until(lambda: reported, "a look at the lease")
            assert reported == {"a:1": FOREIGN["holderIdentity"]}
            await asyncio.wait([campaign], timeout=0.3)
            renewed_s = loop_s()
            kubernetes.put(name, {**FOREIGN, "renewTime": again})
            await campaign
        assert loop_s() - renewed_s >= 1.0

    await asyncio.gather(outlive(1999), outlive(2999))


async def test_a_label_does_not_renew_a_lease(kubernetes: KubernetesApi) -> None:
    """Other changes of a lease neither keep a holder that is gone in office, nor cost a live one
    its lease.
    """
    kubernetes.put(LEASE, FOREIGN)
    async with elector(kubernetes, ttl_ms=TTL_MS) as made, asyncio.TaskGroup() as tasks:
        campaign = tasks.create_task(made.campaign())
        for number in range(1_000):
            await asyncio.wait([campaign], timeout=0.1)
            if campaign.done():
                break
            kubernetes.put(LEASE, kubernetes.lease(LEASE)["spec"], {"number": str(number)})
        async with kept(campaign.result()) as keeping:
            kubernetes.put(LEASE, kubernetes.lease(LEASE)["spec"], {"number": "last"})
            await renewals(kubernetes, 1)
            assert not keeping.done()


async def test_another_program_may_take_the_lease(kubernetes: KubernetesApi) -> None:
    """The holder finds that out when it renews, and leaves the lease alone from then."""
    async with elector(kubernetes, ttl_ms=TTL_MS) as made:
        term = await made.campaign()
        kubernetes.put(LEASE, {**FOREIGN, "leaseTransitions": 1})
        assert await term.keep() == f"{FOREIGN['holderIdentity']} has taken the lease"
        await term.resign()
    assert holder_of(kubernetes) == FOREIGN["holderIdentity"]


async def test_one_of_two_candidates_with_the_same_version_is_elected(
    kubernetes: KubernetesApi,
) -> None:
    """The API server refuses the slower one, which then waits."""
    kubernetes.put(LEASE, {})
    kubernetes.trouble(when="^PUT ", delay_s=60, times=2)
    async with (
        elector(kubernetes) as first,
        elector(kubernetes, "b:2") as second,
        asyncio.TaskGroup() as tasks,
    ):
        campaigns = [tasks.create_task(each.campaign()) for each in (first, second)]
        await until(lambda: requests(kubernetes, "PUT") == 2, "both to ask for the lease")
        looks = requests(kubernetes, "GET")
        kubernetes.heal()
        await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED)
        assert [each.done() for each in campaigns].count(True) == 1
        assert (requests(kubernetes, "PUT"), requests(kubernetes, "GET")) == (2, looks)
        assert kubernetes.lease(LEASE)["spec"]["leaseTransitions"] == 1
        for each in campaigns:
            each.cancel()


# Answers that are lost, and requests that are cut off.


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_an_election_whose_answer_is_lost_counts(
    kubernetes: KubernetesApi, method: str
) -> None:
    """An elector that has the lease, but lost the reply, finds that out at its next poll."""
    if method == "PUT":
        kubernetes.put(LEASE, {})
    kubernetes.trouble(when=f"^{method} ", loses_reply=True, times=1)
    async with elector(kubernetes, ttl_ms=TTL_MS) as made:
        began_s = loop_s()
        await made.campaign()
        assert loop_s() - began_s < TTL_MS / 1_000
        assert kubernetes.lease(LEASE)["spec"]["leaseTransitions"] == (method == "PUT")


async def test_a_renewal_whose_answer_is_lost_counts(kubernetes: KubernetesApi) -> None:
    """The holder finds its own version, and continues from there."""
    async with elector(kubernetes, ttl_ms=TTL_MS) as made, kept(await made.campaign()) as keeping:
        kubernetes.trouble(when="^PUT ", loses_reply=True, times=1)
        await renewals(kubernetes, 2)
        assert not keeping.done()


async def test_a_renewal_that_was_cut_off_does_not_hinder_the_release(
    kubernetes: KubernetesApi,
) -> None:
    """The lease is free at the end, whether the renewal arrives before the release or after it."""
    for is_late in (False, True):
        async with elector(kubernetes, ttl_ms=SHORT_MS) as made:
            term = await made.campaign()
            before, written = requests(kubernetes, "PUT"), kubernetes.lease(LEASE)["spec"]
            kubernetes.trouble(when="^PUT ", delay_s=60, times=1)
            async with kept(term):
                await until(lambda: requests(kubernetes, "PUT") > before, "a renewal on its way")  # noqa: B023 - called before the next
            if not is_late:
                kubernetes.heal()
                kubernetes.put(LEASE, {**written, "renewTime": "2020-01-01T00:00:00.000000Z"})
            await term.resign()
            kubernetes.heal()
            assert holder_of(kubernetes) == ""


async def test_a_hanging_api_server_is_left_in_time(kubernetes: KubernetesApi) -> None:
    """A renewal that hangs is tried again, and the term ends before the lease lapses."""
    async with elector(kubernetes, ttl_ms=SHORT_MS) as made:
        began_s = loop_s()
        term = await made.campaign()
        taken = requests(kubernetes, "PUT")
        kubernetes.trouble(when="^PUT ", delay_s=60)
        assert "could not be renewed" in await term.keep()
        assert loop_s() - began_s < 10
        assert requests(kubernetes, "PUT") - taken >= 2


async def test_a_rough_api_server_delays_elections_and_no_more(kubernetes: KubernetesApi) -> None:
    """With errors, slow and lost replies somebody is elected all the same, and one at the end."""
    random = random_of("kubernetes")
    names = ("a:1", "b:2", "c:3")
    holding: set[str] = set()

    async def campaign_for_ever(made: Elector, name: str) -> None:
        while True:
            term = await made.campaign()
            holding.add(name)
            why = await term.keep()
            holding.remove(name)
            assert why

    async with (
        in_kubernetes(kubernetes).electors(*names, ttl_ms=SHORT_MS) as (made, _),
        asyncio.TaskGroup() as tasks,
    ):
        running = [
            tasks.create_task(campaign_for_ever(each, name))
            for each, name in zip(made, names, strict=True)
        ]
        for _ in range(30):
            times = random.randint(1, 3)
            what: list[dict[str, Any]] = [
                *({"status": status} for status in (408, 429, 500, 502, 503, 504)),
                {"delay_s": random.uniform(0.0, 0.5)},
                {"loses_reply": True},
            ]
            kubernetes.trouble(times=times, when=random.choice(("", "PUT")), **random.choice(what))
            before = len(kubernetes.seen)
            await until(lambda: len(kubernetes.seen) > before, "a request")  # noqa: B023 - called before the next
        kubernetes.heal()
        await until(lambda: len(holding) == 1, "one holder")
        await renewals(kubernetes, 2)
        await until(lambda: len(holding) == 1, "one holder")
        assert holder_of(kubernetes).startswith(next(iter(holding)))
        for each in running:
            each.cancel()
