"""DRelay: keep or repair each slot, seeing all candidates of all slots and the tokens chosen so far."""

from .head import PRESETS, DRelay, DRelayConfig, candidate_read, new_config, repaired_scores
from .train import credit, credit_weights, loss_terms, ramp, selection

__all__ = [
    "DRelay",
    "DRelayConfig",
    "PRESETS",
    "candidate_read",
    "credit",
    "credit_weights",
    "loss_terms",
    "new_config",
    "ramp",
    "repaired_scores",
    "selection",
]
