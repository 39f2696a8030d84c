"""Finds the sites of any decoder-only model, from its structure and one probe forward."""

from midstream.arch.blocks import ROLES
from midstream.arch.detect import Architecture, detect

__all__ = ["ROLES", "Architecture", "detect"]
