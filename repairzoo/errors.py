"""The errors a user can meet. Each is also the built-in error it resembles."""


class RepairZooError(Exception):
    """Base of every error that this package raises on purpose."""


class UnknownName(RepairZooError, KeyError):
    """A name that the registry does not hold; the message lists the nearest ones."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class InvalidInput(RepairZooError, ValueError):
    """A prompt, an id, a budget or an option that cannot be used."""


class InvalidArtifact(RepairZooError, ValueError):
    """A config or weight file that is damaged, incomplete or contradicts itself."""


class IncompatibleArtifact(RepairZooError, ValueError):
    """A sound artifact that does not fit the target, backbone or block it is used with."""


class UnsupportedTarget(RepairZooError, NotImplementedError):
    """A target whose mathematics or cache this package cannot verify and roll back."""


class DoesNotFit(RepairZooError, MemoryError):
    """A run that needs more memory than the device has left; where the plan shows it, before anything is allocated."""


class CaptureFailed(RepairZooError, RuntimeError):
    """A round that cannot be captured into a graph; the message names the operation."""


class HubError(RepairZooError, OSError):
    """A repository of the Hub that cannot be read or written: not found, private, not reachable, interrupted, no room.

    Attributes:
        unreachable: whether the Hub itself did not answer, so that the same request may work later.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
