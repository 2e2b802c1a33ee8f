"""What is measured of the training loop: where the time goes, speed, and workers that are slow."""
