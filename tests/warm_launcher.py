"""Imported by the process that forks launches, before the first of them."""

from tests.forked_slipway import warm_up

warm_up()
