"""Proves a store fit: that it keeps, before it is trusted, what the protocol rests on.

verdict.py    what a check is, and what it comes to
scratch.py    where checks work: names of their own, deleted at the end
races.py      one winner per name
reading.py    what was written is read, whole and in ranges, and what was deleted is not
listing.py    lists are complete and in order
moments.py    the store's clock
two_phase.py  what two-phase compare-and-swap asks of its two stores
checks.py     all checks: what each proves, and what is lost with it
verifying.py  runs them
fit.py        the short form, for the creation of a database
"""
