"""What an interpreter on a node must have: how to install it, and what to import to believe it."""

from __future__ import annotations

from dataclasses import dataclass, replace

PYTHON_LEAST = (3, 11)
WORKER_REQUIREMENTS = ("blake3>=1.0", "httpx>=0.28,<1", "numpy>=1.26", "pydantic>=2.9,<3", "tenacity>=9,<10")
"""The small dependencies of a worker; torch comes from the profile's ``environment.packages``."""
SOAP_REQUIREMENT = "pytorch-optimizer>=4.1,<5"
WORKER_IMPORTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("torch", (2, 10)),
    ("numpy", (1, 26)),
    ("pydantic", (2, 9)),
    ("httpx", ()),
    ("blake3", ()),
    ("tenacity", ()),
)
"""What is imported to believe in an environment. torch before 2.10 does not have all that the worker uses."""


@dataclass(frozen=True)
class Needs:
    """Of one kind of process."""

    who: str
    """For messages: ``a worker``."""
    requirements: tuple[str, ...]
    imports: tuple[tuple[str, tuple[int, ...]], ...]
    """Module and least version."""
    packages: bool = True
    """Whether the profile's ``environment.packages`` (torch and the like) are wanted too."""
    extras: str = "worker"
    """What of islandctl itself to install on this machine, if something is missing here."""

    @property
    def wanted(self) -> list[list[object]]:
        """``imports`` as the node is told them."""
        return [[name, list(least)] for name, least in self.imports]


def worker_needs(optimizer: str = "adamw") -> Needs:
    """Of a node that trains.

    Args:
        optimizer: the recipe's ``training.optimizer.kind``; empty: a script has its own.
    """
    needs = Needs("a worker", WORKER_REQUIREMENTS, WORKER_IMPORTS)
    if optimizer != "soap":
        return needs
    return replace(
        needs,
        who="a worker with the optimizer soap",
        requirements=(*needs.requirements, SOAP_REQUIREMENT),
        imports=(*needs.imports, ("pytorch_optimizer", ())),
        extras="worker,soap",
    )


RELAY_NEEDS = Needs(
    "the relay",
    (
        "blake3>=1.0",
        "cryptography>=43",
        "httpx>=0.28,<1",
        "prometheus-client>=0.21",
        "pydantic>=2.9,<3",
        "starlette>=0.45",
        "tenacity>=9,<10",
        "uvicorn>=0.34",
    ),
    (("pydantic", (2, 9)), ("starlette", ()), ("uvicorn", ()), ("blake3", ()), ("prometheus_client", ())),
    packages=False,
)
"""Of a host that only carries the relay: no torch."""
