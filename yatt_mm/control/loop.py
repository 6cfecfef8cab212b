"""The training loop, as a list of calls. Every controller runs it on its own share of the prompts.

What each call does is in `yatt_mm.control.controller`. Which role is awake in a phase is in
`yatt_mm.protocol.placement_model`.
"""

from __future__ import annotations

from yatt_mm.common.errors import StopRequested
from yatt_mm.control.controller import Controller
from yatt_mm.protocol.placement_model import Phase


def evaluate(controller: Controller) -> int:
    """Measure a model on the held-out sets, and do nothing else. Return its step, which is 0."""
    if not controller.is_begun:
        controller.begin()
    return controller.step


def train(controller: Controller) -> int:
    """Run GRPO (arXiv 2402.03300) from the start, or the checkpoint, to the last step, or until the run is told to
    stop. Return the last step that is saved."""
    controller.resume()
    try:
        for _step in controller.steps():
            groups = controller.generate()
            plans = controller.plan(groups)
            with controller.phase(Phase.TRAIN):
                controller.update(plans, groups)
            with controller.phase(Phase.PUBLISH):
                controller.publish()
    except StopRequested:
        return controller.give_up_step()
    controller.export()
    return controller.step
