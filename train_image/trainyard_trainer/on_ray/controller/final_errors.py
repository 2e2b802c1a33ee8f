"""End the run immediately if a worker fails with an error that a restart of the workers cannot fix."""

from __future__ import annotations

from typing import Any

import ray.train
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import RestartingState

from trainyard_trainer.errors import TrainerError


class EndOnFinalError(ControllerCallback):
    """A callback that ends Ray Train's run instead of restarting the workers if an error is final."""

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, RestartingState):
            error = final_error(current_state.training_failed_error)
            if error is not None:
                raise error


def final_error(error: BaseException | None) -> TrainerError | None:
    """Return the final error of the worker with the lowest rank; None if no worker has one.

    An error is final if a retry cannot fix it (`TrainerError.is_final`).
    """
    if isinstance(error, ray.train.ControllerError):
        return _if_final(error.controller_failure)
    if not isinstance(error, ray.train.WorkerGroupError):
        return None
    causes = (getattr(each, "_base_exc", each) for _, each in sorted(error.worker_failures.items()))
    return next((found for cause in causes if (found := _if_final(cause))), None)


def _if_final(error: BaseException | None) -> TrainerError | None:
    return error if isinstance(error, TrainerError) and error.is_final else None
