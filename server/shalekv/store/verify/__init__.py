"""Checks whether a store keeps the guarantees that the protocol relies on, before it is trusted.

verdict.py    a check, its verdict, and the guarantees of a database
scratch.py    the objects of the checks: names of their own, deleted at the end
races.py      one winner per name
reads.py      reads, ranges, lists and the clock
two_phase.py  requirements of two-phase compare-and-swap on its two stores
verify.py     all checks, their run, and the short form for the creation of a database
"""
