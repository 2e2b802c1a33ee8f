"""Fetch what workers read from a bucket or a hub, once on each node, before the workers start."""

from __future__ import annotations

from trainyard_trainer.on_ray.ray_cluster import worker_resources  # first: Ray reads variables

# isort: split
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import TrainerError
from trainyard_trainer.on_ray.ray_errors import in_one_line
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder


def fetch_on_nodes(task: TrainingTask, folder: RunFolder) -> None:
    """Fetch on all nodes with room for a worker, and record the result. Raises TrainerError.

    A node that joins later fetches when its workers start.
    """
    recipe = recipe_of(task.config, task.data.info)
    if not recipe.fetches_files:
        return
    wanted = worker_resources(task.config.scaling)
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"]
        and all(node["Resources"].get(name, 0) >= amount for name, amount in wanted.items())
    ]
    answers = {
        node["NodeManagerHostname"]: _fetch.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(task.config)
        for node in nodes
    }
    found: list[str] = []
    for name, answer in answers.items():
        try:
            found.append(ray.get(answer))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TrainerError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:
            print(
                f"node {name} was lost while it fetched the model: {in_one_line(error)}", flush=True
            )
    recipe.note_fetched(folder, found)


@ray.remote(num_cpus=0, max_retries=0)
def _fetch(config: TrainerConfig) -> str:
    """Fetch on this node, and return the SHA-256."""
    return recipe_of(config).fetch()
