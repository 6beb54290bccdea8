"""What a plan asks of the host that it is run from: ranks that run at once, and a container image."""

from __future__ import annotations

from containers.errors import ContainerError
from containers.lock import read_lock
from containers.names import is_short_name
from perception.cores import available_cores
from perception.errors import UserError
from perception.run_folder import gpu_names
from sweeps.planning.plan import Plan


def check_here(plan: Plan) -> None:
    """Raise UserError for what a plan asks for and this host has not: slots, or an image of that name."""
    slots = slots_of(plan)
    for model in plan.models:
        if slots is not None and model.num_ranks > slots:
            raise UserError(
                f"{plan.path}: model {model.model}: its {model.num_ranks} ranks are more than the {slots} slots there "
                "are here: give fewer ranks_per_node, or local.slots"
            )
    if plan.image and is_short_name(plan.image):
        try:
            read_lock().image(plan.image)
        except ContainerError as error:
            raise UserError(f'{plan.path}: image = "{plan.image}": {error}') from None


def slots_of(plan: Plan) -> int | None:
    """Ranks that run at once; None where only the scheduler knows."""
    if plan.launcher != "local":
        return None
    return plan.local.slots or len(gpu_names()) or available_cores()
