"""DeLS: a local expert (GRU or Markov) added to the logits of a parallel draft, with a unigram prior divided out."""

from .convert import convert_published, load_counts
from .head import DeLS, DeLSConfig, log_prior_from_counts
from .train import gather_windows, loss

__all__ = ["DeLS", "DeLSConfig", "convert_published", "gather_windows", "load_counts", "log_prior_from_counts", "loss"]
