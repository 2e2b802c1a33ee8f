"""`python -m trainyard_trainer [--without-ray]`: one attempt at a run, in this process or in a forked one."""

from __future__ import annotations

import sys

from trainyard_trainer.on_ray.pod_ray import driver_client


def main() -> int:
    """Run the program, unless it has been forked from a process that has imported its modules."""
    driver_client.be_forked("trainyard_trainer.program")
    from trainyard_trainer import program

    return program.main()


if __name__ == "__main__":
    sys.exit(main())
