"""Costs of one process: who has caused the requests to the store that are paid for.

    a call has waited for requests ---- at its end ---------------> charged to its origins
    a group of commits is durable ----- to one of its commits ----> charged to its origins
    nobody is charged ---------------------------------------------> "background"

Each charge has three origins: its method, its principal, and the prefix of its first key. Requests
are charged once, as whole numbers, so the sums of the three dimensions are equal: all requests that
the process has sent, but for those of calls and groups that have not ended.

A group is charged to a commit that is chosen by chance. With many groups each origin gets its part
of them. Their calls are estimated the same way: a group of ten commits counts as ten calls of the
one. No call pays for this with time of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from shalekv.telemetry.activity import SentCounts
from shalekv.telemetry.contained import contained
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.prices import PriceList

# Names of their own among the origins. No principal and no prefix is called like that: the one has
# a colon in it, the other ends with a separator.
BACKGROUND, OTHER = "background", "other"
ANONYMOUS, NO_PREFIX = "anonymous", "none"
ORIGINS_MAX = 100  # principals, and prefixes, that are told apart; each takes about 1 KB
FORGET_MS = 3_600_000  # an origin without charges and calls for so long becomes a part of "other"
PREFIX_BYTES_MAX = 64
_PREFIX = re.compile(rb".[^/:]{0,%d}[/:]" % (PREFIX_BYTES_MAX - 2), re.DOTALL)
_PRINTABLE = range(0x20, 0x7F)
SHARES_MAX = 1_000  # between two transfers to the accounts; each takes about 0.5 KB


class SentRequests(Protocol):
    """The requests of a process: `store.api.RequestCounts`."""

    @property
    def by_kind(self) -> Mapping[Any, int]:
        """All requests, by kind."""
        ...

    def take(self, sent: SentCounts) -> bool:
        """Take the requests of an activity to charge them; returns whether nobody has before."""
        ...

    def untaken(self) -> Iterator[SentCounts]:
        """Yield the requests of activities that have not been taken and still exist."""
        ...


class Charges(NamedTuple):
    """Requests that were charged to one name of a dimension."""

    name: str
    calls: int
    sent: Mapping[str, int]  # by kind


def prefix_of(key: bytes) -> str:
    r"""Return the prefix that a key is charged to: up to its first ``/`` or ``:``, inclusive.

    A separator that is the first byte doesn't count, nor does one behind `PREFIX_BYTES_MAX`.
    Bytes that are no printable ASCII, and backslashes, are written as ``\xNN``.
    """
    found = _PREFIX.match(key)
    if found is None:
        return NO_PREFIX
    prefix = found[0].decode("latin-1")
    if prefix.isascii() and prefix.isprintable() and "\\" not in prefix:
        return prefix
    return "".join(map(_shown, found[0]))


def _shown(byte: int) -> str:
    return chr(byte) if byte in _PRINTABLE and byte != ord("\\") else f"\\x{byte:02x}"


class _Share:
    """Requests charged to calls with the same three origins, since the last transfer."""

    __slots__ = ("calls", "charged_ms", "sent")

    def __init__(self) -> None:
        self.calls = 0
        self.charged_ms = 0.0
        self.sent = SentCounts()


class _Account:
    """Calls and requests of one name."""

    __slots__ = ("calls", "changed_ms", "sent", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight  # decides who is evicted
        self.calls = 0
        self.sent = SentCounts()
        self.changed_ms = 0.0

    def add(self, sent: Mapping[str, int], calls: int) -> None:
        self.sent.add(sent)
        self.calls += calls


class Accounts:
    """The accounts of one dimension: those of the names that cost most, and one of all others.

    When there are too many, the one of the least weight becomes a part of "other", and the new one
    inherits its weight (the algorithm Space-Saving): so a name that costs more than a hundredth of
    all stays, however many others there are. What is charged is exact.
    """

    def __init__(self, accounts_max: int | None = ORIGINS_MAX) -> None:
        """At most `accounts_max` names have accounts; None: as many as there are."""
        self._max = accounts_max
        self._accounts: dict[str, _Account] = {}
        self._other = _Account(0)

    def charge(
        self, name: str, sent: Mapping[str, int], calls: int, *, weight: int, now_ms: float
    ) -> None:
        """Add requests and calls to the account of `name`."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(self._evicted_weight())
        account.weight += weight
        account.changed_ms = now_ms
        account.add(sent, calls)

    def add_calls(self, name: str, calls: int, now_ms: float) -> None:
        """Add calls to the account of `name`, if it has one or there is space; else to others."""
        if name in self._accounts or self._has_space:
            self.charge(name, {}, calls, weight=0, now_ms=now_ms)
        else:
            self._other.calls += calls

    def forget(self, changed_before_ms: float) -> None:
        """Close the accounts that have not changed since then."""
        old = [n for n, each in self._accounts.items() if each.changed_ms < changed_before_ms]
        for name in old:
            self._close(name)

    def origins(self) -> Iterator[Charges]:
        """Yield what is in the accounts, those with the greatest weight first."""
        accounts = self._accounts.items()
        for name, each in sorted(accounts, key=lambda item: (-item[1].weight, item[0])):
            yield Charges(name, each.calls, each.sent)
        if self._other.sent or self._other.calls:
            yield Charges(OTHER, self._other.calls, self._other.sent)

    @property
    def _has_space(self) -> bool:
        return self._max is None or len(self._accounts) < self._max

    def _evicted_weight(self) -> int:
        """Make space for an account, and return the weight that it inherits."""
        if self._has_space:
            return 0
        least = min(self._accounts, key=lambda name: self._accounts[name].weight)
        return self._close(least)

    def _close(self, name: str) -> int:
        account = self._accounts.pop(name)
        self._other.add(account.sent, account.calls)
        return account.weight


class Costs:
    """Charges of one process."""

    def __init__(
        self, sent: SentRequests, prices: PriceList, now_ms: Callable[[], float] = float
    ) -> None:
        """`sent` are all requests of the process, `now_ms` is its clock."""
        self.prices = prices
        self._sent = sent
        self._now_ms = now_ms
        # By method, principal and prefix: a charge is one addition, and not one for each of them.
        self._shares: dict[tuple[str, str, str], _Share] = {}
        self._methods = Accounts(None)
        self._principals = Accounts()
        self._prefixes = Accounts()

    @contained
    def charge(
        self, method: str, principal: str, key: bytes, sent: SentCounts, calls: int = 1
    ) -> None:
        """Charge the requests of an activity, `Activity.sent`, to one call; the first time only.

        `calls` is how many the one stands for; `principal` is empty for an anonymous one.
        """
        if not self._sent.take(sent):
            return
        origins = (method, principal or ANONYMOUS, prefix_of(key))
        share = self._shares.get(origins)
        if share is None:
            if len(self._shares) >= SHARES_MAX:
                self._transfer()
            share = self._shares[origins] = _Share()
        share.calls += calls
        share.charged_ms = self._now_ms()
        share.sent.add(sent)

    def _transfer(self) -> None:
        """Move all shares to the accounts of their origins."""
        for (method, principal, prefix), share in self._shares.items():
            sent, now_ms = share.sent, share.charged_ms
            weight = self.prices.cost(sent) or sum(sent.values())
            # The calls of methods and principals are counted elsewhere, and exactly.
            self._methods.charge(method, sent, 0, weight=weight, now_ms=now_ms)
            self._principals.charge(principal, sent, 0, weight=weight, now_ms=now_ms)
            self._prefixes.charge(prefix, sent, share.calls, weight=weight, now_ms=now_ms)
        self._shares.clear()

    def add_calls(self, principal: str, calls: int) -> None:
        """Add calls that a principal has made."""
        self._transfer()
        self._principals.add_calls(principal or ANONYMOUS, calls, self._now_ms())

    def background(self) -> Mapping[str, int]:
        """Return the requests that no call has caused."""
        self._transfer()
        background = Counter[str](self._sent.by_kind)
        for origin in self._methods.origins():  # which has an account for each
            background.subtract(origin.sent)
        for each in self._sent.untaken():
            background.subtract(each)
        return +background

    def methods(self, calls: Mapping[str, int]) -> Iterator[Charges]:
        """Yield the methods. `calls` are all that were made, by method."""
        self._transfer()
        charged = {origin.name: origin.sent for origin in self._methods.origins()}
        for name in {**charged, **calls}:
            yield Charges(name, calls.get(name, 0), charged.get(name, {}))
        yield Charges(BACKGROUND, 0, self.background())

    def principals(self) -> Iterator[Charges]:
        """Yield the principals that cost most, others, and the background."""
        return self._bounded(self._principals)

    def prefixes(self) -> Iterator[Charges]:
        """Yield the prefixes that cost most, others, and the background."""
        return self._bounded(self._prefixes)

    def _bounded(self, accounts: Accounts) -> Iterator[Charges]:
        self._transfer()
        accounts.forget(self._now_ms() - FORGET_MS)
        yield from accounts.origins()
        yield Charges(BACKGROUND, 0, self.background())

    def collect(self, metrics: Metrics) -> None:
        """Add the samples of all three dimensions. What has no known price has no cost."""
        for origin in self.methods({}):
            self._add_dollars(metrics, "method", origin)
        for dimension, origins in (("principal", self.principals()), ("prefix", self.prefixes())):
            for origin in origins:
                self._add_dollars(metrics, dimension, origin)
                if origin.name != BACKGROUND:
                    metrics.add(f"{dimension}_calls", origin.calls, origin.name)

    def _add_dollars(self, metrics: Metrics, dimension: str, origin: Charges) -> None:
        dollars = self.prices.dollars(origin.sent)
        if dollars is not None:
            metrics.add(f"{dimension}_cost_dollars", dollars, origin.name)
