"""Ops of our own: contraction, attention and random masks, whole where ATen would cut them."""
