"""CURE: branches at the fragile slots of a chain, verified beside it in one token tree. Nothing is trained."""

from .head import CURE, branch_budget

__all__ = ["CURE", "branch_budget"]
