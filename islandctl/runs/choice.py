"""Which checkpoint a resume takes, and why not a newer one: a pure function of the ledger and the nodes' verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from islandctl.config.model import Model
from islandctl.errors import CheckpointError, UsageError
from islandctl.ledger.joint import JointCheckpoint, Unjoined

MAX_SHOWN = 3
"""Checkpoints that a message speaks of one by one."""


class Choice(Model):
    """What a resume goes back to."""

    joint: JointCheckpoint | None
    """None: the run starts again from its first step."""
    passed_over: tuple[str, ...] = ()
    """Newer ones and why not, newest first, one line each."""

    @property
    def step(self) -> int:
        """The step that the run goes back to."""
        return self.joint.step if self.joint else 0

    @property
    def text(self) -> str:
        """One line for people."""
        if self.joint is None:
            return "step 0: no joint checkpoint is used" if self.passed_over else "step 0: no joint checkpoint yet"
        return f"step {self.joint.step}: the joint checkpoint of attempt {self.joint.attempt}"


def choose(
    joint: Sequence[JointCheckpoint],
    unjoined: Sequence[Unjoined],
    faults_of: Callable[[JointCheckpoint], Sequence[str]],
    *,
    step: int | None = None,
) -> Choice:
    """The newest joint checkpoint that every node holds unharmed.

    Args:
        joint: all of the run's present line, oldest first.
        unjoined: newer steps that never became joint, for the reasons.
        faults_of: verifies one on its nodes and tells what is wrong with it; only asked where the answer matters.
        step: take exactly this step (``--from``); 0 is the beginning.

    Raises:
        UsageError: there is no joint checkpoint at ``step``.
        CheckpointError: the one at ``step`` is damaged, or joint ones exist and all of them are.
    """
    if step is not None:
        return _exactly(joint, faults_of, step)
    passed = [f"step {one.step}: {one.reason}" for one in sorted(unjoined, key=lambda one: -one.step)]
    for candidate in sorted(joint, key=lambda one: -one.step):
        faults = faults_of(candidate)
        if not faults:
            return Choice(joint=candidate, passed_over=tuple(passed))
        passed.append(f"step {candidate.step}: {', '.join(faults)}")
    if joint:
        older = len(passed) - MAX_SHOWN
        shown = passed[:MAX_SHOWN] + ([f"and {older} older ones likewise"] if older > 0 else [])
        raise CheckpointError(
            "no joint checkpoint can be used: " + "; ".join(shown),
            hint="bring the files back, or start again from the beginning with --from 0",
        )
    return Choice(joint=None, passed_over=tuple(passed))


def _exactly(
    joint: Sequence[JointCheckpoint], faults_of: Callable[[JointCheckpoint], Sequence[str]], step: int
) -> Choice:
    newer = [str(one.step) for one in joint if one.step > step]
    what = f"step{'s' if len(newer) > 1 else ''} {', '.join(newer[-MAX_SHOWN:])}"
    what += f" and {len(newer) - MAX_SHOWN} more" if len(newer) > MAX_SHOWN else ""
    passed = (f"{what}: --from {step} was asked for",) if newer else ()
    if step == 0:
        return Choice(joint=None, passed_over=passed)
    candidate = next((one for one in joint if one.step == step), None)
    if candidate is None:
        known = ", ".join(str(one.step) for one in joint) or "none"
        raise UsageError(f"there is no joint checkpoint at step {step}", hint=f"joint checkpoints: {known}")
    faults = faults_of(candidate)
    if faults:
        raise CheckpointError(
            f"checkpoint of step {step}: {'; '.join(faults)}", hint="choose another step with --from"
        )
    return Choice(joint=candidate, passed_over=passed)
