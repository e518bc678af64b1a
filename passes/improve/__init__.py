"""Passes over a lowered program: when its collectives start, when they are waited for, which run as one."""
