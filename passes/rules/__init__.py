"""Sharding rules: a table of op -> rule, one file per op family, and their checker."""
