"""What two served runs show: which outputs differ, and whether each run was what it had to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.ab.runs.subprocess import FLAG, CouldNotRunError

OURS = "vllm_omni_session_state."
"""Where the plugin's manager class is defined."""


@dataclass(slots=True)
class Served:
    """What one run reported.

    Attributes:
        outputs: Digest by output, in order.
        looks: The worker's listings, in order.
    """

    outputs: dict[str, str] = field(default_factory=dict)
    looks: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Keep what an event brings."""
        self.outputs.update(event.get("outputs", {}))
        if "look" in event:
            self.looks.append(event["look"])


def differences(off: Served, on: Served) -> list[str]:
    """The outputs that are not equal to the bit, or that only one run has, in order."""
    names = {**off.outputs, **on.outputs}
    return [name for name in names if off.outputs.get(name) != on.outputs.get(name)]


def check_runs(off: Served, on: Served) -> None:
    """See that the runs may be compared: outputs there are, and only the flagged run used the plugin.

    A listing that was also made while a request ran must show that request in the plugin's hands.

    Raises:
        CouldNotRunError: They may not.
    """
    if not off.outputs or not off.looks or not on.looks:
        raise CouldNotRunError("a run ended without outputs or without a listing")
    for flag, run in (("0", off), ("1", on)):
        for look in run.looks:
            manager = look["manager"]
            if look["pid"] == look["from"]:
                raise CouldNotRunError(f"with {FLAG}={flag} the model ran in the client's own process")
            if flag == "0" and manager is not None:
                raise CouldNotRunError(f"with {FLAG}=0 the model still used a manager: {manager}")
            if flag == "1" and not str(manager).startswith(OURS):
                raise CouldNotRunError(
                    f"with {FLAG}=1 the model used {manager or 'no manager'} and not the plugin's; a WARNING "
                    "in the log says why, or vllm-omni-session-state is not installed in this environment"
                )
            if flag == "1" and not any(session["nbytes"] for session in look.get("during", look["sessions"])):
                raise CouldNotRunError(
                    f"with {FLAG}=1 the plugin's manager held nothing while the model served: {look['of']}"
                )


def left_behind(on: Served) -> list[str]:
    """The requests after which the flagged run's worker still held a session or bytes of one, in order.

    Only a model whose sessions are requests is asked; a robot's session is there to stay.
    """
    return [look["of"] for look in on.looks if "during" in look and (look["sessions"] or look["alive"])]
