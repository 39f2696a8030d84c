"""Finds the sites of any decoder-only model, from its structure and one probe forward."""

from midstream.arch.detect import Architecture, detect
from midstream.arch.names import ROLES

__all__ = ["ROLES", "Architecture", "detect"]
