"""Attacks on our own guarantee: lower bounds to hold against the accountant's."""
