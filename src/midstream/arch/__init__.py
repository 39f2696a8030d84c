"""Finds the sites of any decoder-only model, from its structure and one probe forward."""

from midstream.arch.blocks import ROLES
from midstream.arch.detect import Architecture, detect, unknown_logits
from midstream.arch.heads import parts_left_out, split_heads
from midstream.arch.routers import split_routers

__all__ = ["ROLES", "Architecture", "detect", "parts_left_out", "split_heads", "split_routers", "unknown_logits"]
